"""One memory of which something was saved for backward, and its way to the host and back.

[Note: whose memory it is] Swap frees nothing by force: autograd keeps a :class:`SavedTensor` in the place of a tensor, and as long as that
is on the device, the tensor itself. When the bytes are on the host, it lets go. Memory that somebody else holds therefore stays what it
is, and what comes back is a new memory with the same bytes, and the tensors that were saved as views of it.

[Note: written after it was saved] As autograd itself does, each saved tensor remembers how often it had been written when it was
saved, and refuses to be used if that has changed: asked until it is given up for the copy on the host, which no write reaches.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

from hp_platform.platform import Platform
from hp_platform.protocols.storage import StoragePlace
from hp_platform.protocols.tensor import Tensor

ALIGNMENT = 256
"""Bytes: what comes back lies as it did, modulo this, so that kernels which ask for alignment take the same way."""


class State(Enum):
    """Where a memory is."""

    DEVICE = "device"
    TO_HOST = "d2h"
    HOST = "host"
    TO_DEVICE = "h2d"


_NEXT = {
    State.DEVICE: (State.TO_HOST, State.HOST),  # to HOST: back again, when its bytes were left there
    State.TO_HOST: (State.HOST, State.DEVICE),  # to DEVICE: backward came first
    State.HOST: (State.TO_DEVICE,),
    State.TO_DEVICE: (State.DEVICE,),
}


class SavedTensor:
    """What autograd keeps in the place of a tensor."""

    __slots__ = (
        "__weakref__",
        "_is_spoiled",
        "_name",
        "_place",
        "_platform",
        "_version",
        "dtype",
        "group",
        "shape",
        "storage",
        "x",
    )

    def __init__(
        self,
        platform: Platform,
        x: Tensor,
        place: StoragePlace | None,
        storage: SwappedStorage | None,
        group: Any,
        name: str,
    ) -> None:
        """``storage`` None: it stays where it is. ``group``: that has saved it. ``name``: for messages."""
        self._platform = platform
        self._version = platform.version(x) if platform.counts_writes(x) else None
        self._place, self._name = place, name
        self.dtype, self.shape = x.dtype, x.shape
        self._is_spoiled = False
        self.x: Tensor | None = x
        """None while the bytes are elsewhere."""
        self.storage, self.group = storage, group

    @property
    def span(self) -> tuple[int, int]:
        """First byte in the storage, and the one behind the last."""
        if self._place is None:
            raise AssertionError("what has no place is not copied")
        return self._place.start, self._place.start + self._place.nbytes

    def shows(self, x: Tensor) -> bool:
        """Whether ``x``, which is on the device, has the same elements at the same place."""
        return (
            self.x is not None
            and self._place is not None
            and self._platform.storage_place(x) == self._place
            and (x.dtype, tuple(x.shape)) == (self.dtype, tuple(self.shape))
        )

    def is_intact(self) -> bool:
        """Whether nobody has written to it since."""
        if self.x is not None and self._version is not None:
            self._is_spoiled = self._is_spoiled or self._platform.version(self.x) != self._version
        return not self._is_spoiled

    def get(self) -> Tensor:
        """The tensor, on its device. RuntimeError if it was written since."""
        if not self.is_intact():
            shape, dtype = tuple(self.shape), self._platform.dtype_name(self.dtype)
            tag = self.storage.group.tag_of(self.storage) if self.storage is not None else None
            operation = self._platform.backward_operation()
            raise RuntimeError(
                f"{self._name}{f' ({tag})' if tag else ''}, {dtype} of shape {shape}, "
                f"{f'which {operation} needs, ' if operation else ''}has been modified by an inplace operation since it was "
                "saved for backward (swap keeps it): clone it before the write, or leave out the in-place operation"
            )
        if self.storage is not None:
            self.group.require(self.storage)
        return self.x if self.x is not None else self._loaded()

    def _loaded(self) -> Tensor:
        storage, place = self.storage, self._place
        if storage is None or place is None or storage.memory is None:
            raise AssertionError("a saved tensor that is nowhere")
        return self._platform.over_bytes(
            storage.memory, place.start - storage.start, self.dtype, self.shape, place.strides
        )


class SwappedStorage:
    """A memory of a group, with all tensors over it that the group has saved."""

    def __init__(self, platform: Platform, group: Any, device: str, key: int) -> None:
        self.platform, self.device, self.key = platform, device, key
        self.group = group
        """With which it moves."""
        self.state = State.DEVICE
        self._saved: list[weakref.ref[SavedTensor]] = []
        self.start = self.nbytes = 0
        """What is copied: this many bytes from this one on. Known when it leaves."""
        self.source: Tensor | None = None
        """Those bytes where they were; held while they are copied."""
        self.memory: Tensor | None = None
        """Those bytes, back on the device."""
        self.parcel: Any = None
        """What they are copied with (:class:`hp_recompute.swapping.parcels.Parcel`)."""
        self.full_nbytes = 0

    def add(self, saved: SavedTensor) -> None:
        """One more tensor over it."""
        self._saved.append(weakref.ref(saved))
        self.full_nbytes = self.platform.storage_nbytes(saved.x)

    def tensors(self) -> Sequence[SavedTensor]:
        """Those that somebody wants still."""
        return [saved for saved in (ref() for ref in self._saved) if saved is not None]

    def is_worth_it(self) -> bool:
        """Whether copying it frees memory: nobody else has tensors over it, and nobody has freed it, who will fill it again."""
        saved = self.tensors()
        intact = [each for each in saved if each.is_intact()]
        if not intact:
            return False
        x = intact[0].x
        number = self.platform.num_over_storage(x)
        if number is not None and number > len(saved):
            return False
        return self.platform.storage_nbytes(x) == self.full_nbytes

    def pack(self) -> Tensor:
        """The bytes to copy. From now on it is on its way."""
        intact = [saved for saved in self.tensors() if saved.is_intact()]
        spans = [saved.span for saved in intact]
        self.start = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
        whole = max(self.platform.itemsize(saved.dtype) for saved in intact)
        stop = -(-max(stop for _, stop in spans) // whole) * whole
        self.nbytes = min(stop, self.full_nbytes) - self.start
        self.source = self.platform.storage_bytes(intact[0].x, self.start, self.nbytes)
        self.move(State.TO_HOST)
        return self.source

    def leave(self) -> None:
        """The bytes are on the host: let go of those on the device. See [Note: written after it was saved]."""
        if self.state is not State.TO_HOST:  # backward came first
            return
        for saved in self.tensors():
            saved.is_intact()
            saved.x = None
        self.source = None
        self.move(State.HOST)

    def come_back(self, memory: Tensor) -> None:
        """``memory`` gets the bytes."""
        self.memory = memory
        self.move(State.TO_DEVICE)

    def forget(self) -> None:
        """Let go of what came back; the bytes on the host are there still."""
        self.memory = None
        self.move(State.HOST)

    def move(self, state: State) -> None:
        """UserWarning for a way that there is not."""
        if state not in _NEXT[self.state]:
            warnings.warn(
                f"a swapped storage goes from {self.state.value} to {state.value}, which is no way of its own: from "
                f"{self.state.value} it goes to {' or '.join(each.value for each in _NEXT[self.state])}",
                stacklevel=2,
            )
        self.state = state
