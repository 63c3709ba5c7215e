"""The same job in one process: what a sharded run is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOLERANCE = 1e-10
"""For float64. Sums over ranks are made in another order than in one process, which costs some units in the last place
(1e-16) per step; AdamW's division by the root of the squares enlarges that where gradients are small, and Muon's iteration where
singular values are."""


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between two runs of the same job."""

    loss: float
    parameter: float
    name: str
    """The parameter where it is largest."""

    def within_tolerance(self) -> bool:
        """Whether both are below :data:`TOLERANCE` (NaN is not)."""
        return self.loss < TOLERANCE and self.parameter < TOLERANCE


def compare(losses: list[float], others: list[float], file: Path, other: Path) -> Difference:
    """Losses step by step, and the parameters of two exported safetensors files."""
    import numpy as np
    from safetensors.numpy import load_file

    if len(losses) != len(others):
        raise RuntimeError(f"the runs differ in length: {len(losses)} and {len(others)} steps")
    ours, theirs = load_file(file), load_file(other)
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"the runs differ in parameters: {sorted(ours.keys() ^ theirs.keys())}")
    worst = {name: float(np.abs(ours[name].astype(np.float64) - theirs[name]).max()) for name in ours}
    # max() passes over NaN where it does not come first; NaN must win
    name = max(worst, key=lambda n: (np.isnan(worst[n]), worst[n]))
    loss = float(np.max(np.abs(np.subtract(losses, others))))
    return Difference(loss, worst[name], name)
