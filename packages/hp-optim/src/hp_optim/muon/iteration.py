"""The iteration of a stack in memory that is taken before it: products alone, which a device may start by one launch.

[Note: memory of an iteration] Besides the result it takes another iterate, ``A`` and ``b A + c A^2`` of
:mod:`hp_optim.muon.newton_schulz`. The iterates take turns, such that the last one is the result, whose memory lives on while it travels;
all else goes back to the stream at the end, and is taken again by the next stack.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hp_optim.muon.coefficients import Triple
from hp_platform.platform import Platform
from hp_platform.protocols.device import Repeated


def iterated(
    platform: Platform,
    repeated: Repeated,
    name: Hashable,
    x: Any,
    norm: Any,
    dtype: Any,
    triples: Sequence[Triple],
    margin: float,
    epsilon: float,
) -> Any:
    """Iterates of ``x / (margin norm + epsilon)``. ``name`` says everything that no tensor does; ``norm`` changes."""
    count, rows, cols = x.shape
    device, small = platform.device_of(x), min(rows, cols)
    result, other = (platform.empty((count, rows, cols), dtype, device) for _ in range(2))
    gram, inner = (platform.empty((count, small, small), dtype, device) for _ in range(2))

    def work() -> None:
        present, following = (result, other) if len(triples) % 2 == 0 else (other, result)
        platform.quotient(x, divisor(platform, norm, margin, epsilon), dtype, out=present)
        is_wide = rows <= cols
        for a, b, c in triples:
            platform.gram(present if is_wide else platform.transpose(present, 1, 2), out=gram)
            platform.square_add(gram, alpha=c, beta=b, out=inner)
            factors = (inner, present) if is_wide else (present, inner)
            platform.matmul_add(present, *factors, beta=a, out=following)
            present, following = following, present

    repeated.run(name, (x, norm, result, other, gram, inner), work)
    return result


def divisor(platform: Platform, norm: Any, margin: float, epsilon: float) -> Any:
    """``margin norm + epsilon``, in the place of the norm."""
    if margin != 1.0:
        platform.mul_(norm, margin)
    return platform.add_(norm, epsilon)
