"""Batches one after the other, such that everything but the iterations of the present one runs below them.

[Note: what runs when] For every batch: its matrices come, are orthogonalised, go back, and are applied. While batch k is
orthogonalised, the momentum of batch k + 1 moves and its matrices come, and the results of batch k - 1 go back and are applied::

    iteration            |     0      |     1      |     2      |     3      |
    exchange    come 0, come 1, back 0, come 2, back 1, come 3, back 2, ...   back 3
    memory      pack 0, pack 1,       apply 0, pack 3, ...                    apply 3

The iterations have a stream of their own, of high priority: momentum and updates, which wait for memory, and the exchanges fill
what the products leave free. The host only starts things: whoever needs something waits for it on the device.

[Note: memory of two streams] A block of memory goes back to the stream that it was taken on, and is free for what that stream does
next. So what one stream has made for the other is held until the maker has waited for the reader: matrices that have come
until their batch is iterated, results until they are applied. Besides parameters and state there are at most three batches of
matrices and three of results at a time, whatever the host starts ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hp_optim.muon.batches import Batch, Stack
from hp_optim.muon.devices import Devices
from hp_optim.muon.exchange import Coming, GoingBack, Results
from hp_platform import dropped
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class Steps(Protocol):
    """What is done with a batch; see :class:`hp_optim.muon.step.Step`."""

    def packed(self, batch: Batch) -> Tensor:
        """The elements of ``batch.packed_cuts`` in a row, in the dtype that travels, on the device; momentum that is due moves on."""
        ...

    def orthogonalised(self, batch: Batch, stack: Stack, x: Tensor) -> Tensor:
        """The result of a stack of the batch, contiguous."""
        ...

    def apply(self, batch: Batch, results: Results) -> None:
        """Move the parameters."""
        ...


def run(platform: Platform, batches: Sequence[Batch], steps: Steps, devices: Devices) -> None:
    """All batches. Communication: two all-to-all per batch with a group."""
    try:
        _run(platform, batches, steps, devices)
    except BaseException:  # memory of either stream is dropped in which the other may still work
        for device in dict.fromkeys(batch.lane.device for batch in batches):
            present, iterations = platform.device(device).current_stream(), devices.stream(device)
            dropped.wait_for_stream(present, iterations)
            dropped.wait_for_stream(iterations, present)
        raise


def _run(platform: Platform, batches: Sequence[Batch], steps: Steps, devices: Devices) -> None:
    turns: list[Turn] = []
    for number in range(len(batches) + 1):
        if number < len(batches):
            turns.append(Turn(platform, batches[number], steps, devices))
        if number >= 3:
            turns[number - 3].release()
        if number >= 1:
            turns[number - 1].iterate()
        if number >= 2:
            turns[number - 2].finish()
    if turns:
        turns[-1].finish()
    for turn in turns[-2:]:
        turn.release()


class Turn:
    """A batch on its way; to be asked for in this order. The current stream is the one that all else runs on."""

    def __init__(self, platform: Platform, batch: Batch, steps: Steps, devices: Devices) -> None:
        """Momentum moves, and the matrices come."""
        self._platform, self._batch, self._steps = platform, batch, steps
        self._device = platform.device(batch.lane.device)
        self._stream = devices.stream(batch.lane.device)
        self._repeated = devices.repeated(batch.lane.device)
        self._coming: Coming | None = Coming(platform, batch, steps.packed(batch), self._repeated)
        self._back: GoingBack | None = None
        self._event = self._device.current_stream().record_event()

    def iterate(self) -> None:
        """They are orthogonalised, and the results go back."""
        assert self._coming is not None
        with self._device.use_stream(self._stream):
            self._stream.wait_event(self._event)
            matrices = self._coming.wait()
            stacks = zip(self._batch.stacks, matrices, strict=True)
            results = [self._steps.orthogonalised(self._batch, stack, x) for stack, x in stacks]
            self._back = GoingBack(self._platform, self._batch, results, self._repeated)
            self._event = self._stream.record_event()

    def finish(self) -> None:
        """The parameters move."""
        assert self._back is not None
        current = self._device.current_stream()
        current.wait_event(self._event)
        self._coming = None
        self._steps.apply(self._batch, self._back.wait())
        self._event = current.record_event()

    def release(self) -> None:
        """The results are held no longer."""
        self._stream.wait_event(self._event)
        self._back = None
