"""Batches one after the other, such that the exchanges of the next and of the last one run below the iteration of the present one.

[Note: what runs when] For every batch: its matrices come, are orthogonalised, go back, and are applied. While batch k is
orthogonalised, batch k + 1 is coming and the results of batch k - 1 are going back::

    iteration            |  0  |  1  |  2  |  3  |
    exchange    come 0, 1, back 0, come 2, back 1, come 3, back 2, ...  back 3

So besides the parameters and their state there are at most two batches of matrices and two of results at a time. On devices
with streams the host only starts things: whoever needs what an exchange brings waits on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hp_optim.muon.batches import Batch, Stack
from hp_optim.muon.exchange import Coming, GoingBack
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class Steps(Protocol):
    """What is done with a batch; see :class:`hp_optim.muon.step.Step`."""

    def packed(self, batch: Batch) -> Tensor:
        """The elements of ``batch.packed_cuts`` in a row, in the dtype that travels, on the device; momentum that is due moves on."""
        ...

    def orthogonalised(self, stack: Stack, x: Tensor) -> Tensor:
        """The result of a stack."""
        ...

    def apply(self, batch: Batch, results: Sequence[Tensor]) -> None:
        """Move the parameters; ``results`` in the order of ``batch.applied_cuts``."""
        ...


def run(platform: Platform, batches: Sequence[Batch], steps: Steps) -> None:
    """All batches. Communication: two all-to-all per batch with a group."""
    if not batches:
        return
    finish: Callable[[], None] | None = None
    coming = Coming(platform, batches[0], steps.packed(batches[0]))
    for number, batch in enumerate(batches):
        following = None
        if number + 1 < len(batches):
            following = Coming(platform, batches[number + 1], steps.packed(batches[number + 1]))
        results = [
            steps.orthogonalised(stack, x) for stack, x in zip(batch.stacks, coming.wait(), strict=True)
        ]
        back = GoingBack(platform, batch, results)
        if finish is not None:
            finish()
        finish = _finish(steps, batch, back)
        if following is not None:
            coming = following
    assert finish is not None
    finish()


def _finish(steps: Steps, batch: Batch, back: GoingBack) -> Callable[[], None]:
    return lambda: steps.apply(batch, back.wait())
