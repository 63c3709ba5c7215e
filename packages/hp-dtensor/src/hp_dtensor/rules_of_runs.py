"""Operations that work on the runs of a RaggedShard as they lie: elementwise ones, and sums of all.

A run is a vector of elements in flat order, so what looks at each element by itself gives the run of the result, if all tensors
are cut into the same runs. All other operations get such a tensor whole: see [Note: what rules need not know] in
:mod:`hp_dtensor.rules_view`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hp_dtensor.placements import PARTIAL, RaggedShard
from hp_dtensor.ragged import ragged_dim
from hp_dtensor.rules.reduction import as_floating, local_sum
from hp_dtensor.rules.registry import Outcome, Rule
from hp_dtensor.spec import Spec

ELEMENTWISE: Final = frozenset(
    {"pointwise", "where", "identity", "copied", "negated", "cast", "add", "mul", "div", "reversed_div"}
)
"""Rules of operations that look at each element by itself."""
_SUMS: Final = frozenset({"sum", "mean"})


def of_runs(rule: Rule, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome | None:
    """What to do with runs as they lie, without communication; None where they must be gathered.

    Beside runs, all cut alike, only numbers and 0-d tensors that are Replicate may stand.
    """
    specs = [arg for arg in given if isinstance(arg, Spec)]
    runs = [spec for spec in specs if any(isinstance(p, RaggedShard) for p in spec.placements)]
    if not runs or any(spec is not runs[0] for spec in runs) or kwargs.get("memory_format") is not None:
        return None
    x = runs[0]
    if rule.name in _SUMS:
        return _sum_of_all(rule.name, x, given[1:], kwargs)
    others = (spec for spec in specs if spec is not x)
    if rule.name not in ELEMENTWISE or any(isinstance(arg, tuple) for arg in given):
        return None
    if any(spec.shape or not all(p.is_replicate() for p in spec.placements) for spec in others):
        return None
    inputs = tuple(arg.placements if isinstance(arg, Spec) else None for arg in given)
    return Outcome(inputs, x.placements, x.shape)


def _sum_of_all(name: str, x: Spec, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome | None:
    if any(arg not in (None, (), False) for arg in (*rest, *kwargs.values())):
        return None
    at = ragged_dim(x.placements)
    output = tuple(PARTIAL if i == at else p for i, p in enumerate(x.placements))
    count = math.prod(x.shape)

    def run(local: Any, *_: Any, **__: Any) -> Any:
        if name == "sum":
            return local_sum(local, (0,), False)
        return local_sum(as_floating(local, None, name), (0,), False) / count

    return Outcome((x.placements,), output, (), run=run)
