"""By how much an orthogonal update is multiplied, for a matrix of a shape. Needs no framework.

The update of an orthogonalised matrix ``U (rows, cols)`` is ``-lr * scale(rows, cols) * U``. All entries of ``U`` together have the
root mean square ``1 / sqrt(max(rows, cols))``, if its rank is full: what a learning rate means depends on the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

ScaleRule: TypeAlias = Callable[[int, int], float]
DEFAULT_RULE: Final = "match_rms_adamw"
MATCHED_ADAMW_RMS: Final = 0.2


def match_rms_adamw(rows: int, cols: int, rms: float = MATCHED_ADAMW_RMS) -> float:
    """``rms * sqrt(max(rows, cols))``: the update has the root mean square ``rms``, 0.2 being what AdamW's usually has, so that
    AdamW's learning rate and weight decay can be kept (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982;
    ``match_rms_adamw`` of torch.optim.Muon).
    """
    return rms * math.sqrt(max(rows, cols))


def original(rows: int, cols: int) -> float:
    """``sqrt(max(1, rows / cols))`` (Keller Jordan's Muon, kellerjordan.github.io/posts/muon; ``original`` of torch.optim.Muon)."""
    return math.sqrt(max(1.0, rows / cols)) if cols else 1.0


def spectral(rows: int, cols: int) -> float:
    """``sqrt(rows / cols)``: the change of the layer's output has the size of ``lr`` whatever its width, so that learning rates
    carry over between widths (Yang, Simon, Bernstein, "A spectral condition for feature learning", arXiv 2310.17813).

    For weights ``(out, in)``, as all layers here have them.
    """
    return math.sqrt(rows / cols) if cols else 1.0


def unscaled(rows: int, cols: int) -> float:
    """1: the update has singular values about ``lr``."""
    return 1.0


_RULES: Final[dict[str, ScaleRule]] = {"original": original, "spectral": spectral, "none": unscaled}
SCALE_RULES: Final = (DEFAULT_RULE, *_RULES)
"""The names that ``scale`` takes."""


def scale_rule(given: str | ScaleRule, matched_adamw_rms: float = MATCHED_ADAMW_RMS) -> ScaleRule:
    """The rule of a name of :data:`SCALE_RULES`, or the function ``(rows, cols) -> factor`` itself.

    ``matched_adamw_rms`` counts for ``"match_rms_adamw"`` only. ValueError for an unknown name, and for a root mean square
    that is negative or not finite.
    """
    if not _is_finite(matched_adamw_rms) or matched_adamw_rms < 0:
        raise ValueError(
            f"matched_adamw_rms is {matched_adamw_rms!r}; expected a number of at least 0, as the usual 0.2"
        )
    if callable(given):
        return given
    if given == DEFAULT_RULE:
        return lambda rows, cols: match_rms_adamw(rows, cols, matched_adamw_rms)
    if given not in _RULES:
        raise ValueError(
            f"scale is {given!r}; expected {', '.join(map(repr, SCALE_RULES))}, or a function of (rows, cols)"
        )
    return _RULES[given]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
