"""What one call of a function saves for backward, and moves as one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hp_platform.containers import tensors_in
from hp_platform.platform import Platform
from hp_platform.protocols.local_wrapper import is_local_wrapper
from hp_platform.protocols.tensor import Tensor
from hp_recompute.swapping.chain import Link
from hp_recompute.swapping.choices import fitting
from hp_recompute.swapping.parcels import Parcel, parcels, portions
from hp_recompute.swapping.storage import SavedTensor, State, SwappedStorage

BY_HAND = -1
"""The number of groups that are no part of a step."""

_PORTIONS = 8
"""A group leaves in about so many, each of which may be let go by itself."""


class Group:
    """Of a manager. It does not hold what it has saved: when the graph is freed, that is freed.

    [Note: outputs that two groups save] A function's outputs stay when it ends, since somebody holds them: who called it. When the next function
    saves them, too, as its input, they move with that one, for both: backward wants it first. See :meth:`give`.
    """

    def __init__(
        self,
        manager: Any,
        name: str,
        ordinal: int,
        *,
        fused: bool,
        only_chosen: bool = False,
        link: Link | None = None,
    ) -> None:
        """``only_chosen``: nothing leaves but what :meth:`choose` was told. ``link``: its layer's place in a chain."""
        self.manager, self.name, self.ordinal, self.link = manager, name, ordinal, link
        self.platform: Platform = manager.platform
        self.fused, self.only_chosen = fused, only_chosen
        self.stays_nbytes = 0
        """So much of what may go stays; see :class:`hp_recompute.swapping.calls.SwapOptions`."""
        self.movable: list[int] = []
        """Bytes of memories that nobody else holds: those that have started for the host, or were there when backward came."""
        self.is_wanted = False
        """Whether backward has asked for something of it."""
        self.is_late = False
        """Whether it may leave later than it could: see [Note: room] in :mod:`hp_recompute.swapping.room`."""
        self.on_wanted: Callable[[], None] | None = None
        """See :meth:`hp_recompute.SwapManager.pace`."""
        self._storages: weakref.WeakValueDictionary[int, SwappedStorage] = weakref.WeakValueDictionary()
        self._protected: set[int] = set()
        self._stays: set[int] = set()
        """Memories that were chosen to stay, whoever else saves them."""
        self._chosen: dict[int, tuple[str | None, bool]] = {}
        """By memory: what messages call it, and whether it is packed with others."""
        self._num_saved = 0
        self._leaving: deque[tuple[str, Any, Any, weakref.WeakSet[Parcel]]] = deque()
        """Portions on their way: the device, what copies, the event behind them, what they are, which is held by who saved it."""
        self._coming: list[tuple[Any, Any]] = []

    # --- forward
    def save(self, x: Tensor, is_swapped: Callable[[Tensor], bool] | None = None) -> SavedTensor:
        """What stands for ``x``. ``is_swapped`` is asked for what may go; None: all that may."""
        platform = self.platform
        name = f"saved tensor {self._num_saved} of {self.name}"
        self._num_saved = self._num_saved + 1
        if self._is_of_parameter(x):
            # As it is: who owns a parameter may exchange what is behind the object.
            return SavedTensor(platform, x, None, None, self, name)
        place = platform.storage_place(x)
        device = platform.device_of(x)
        # Not x itself, which may be an output of the node that will hold this: a cycle.
        kept = platform.detach_watched(x)
        if place is None or self.manager.copies_of(device) is None:
            return SavedTensor(platform, kept, None, None, self, name)
        goes = is_swapped is None or is_swapped(x)
        storage = self._storages.get(place.key)
        is_new = storage is None
        if storage is None:
            storage = self.manager.taken_over(place.key) if goes and self.ordinal != BY_HAND else None
            if storage is None:
                storage = SwappedStorage(platform, self, device, place.key)
            storage.group = self
            self._storages[place.key] = storage
        saved = SavedTensor(platform, kept, place, storage, self, name)
        storage.add(saved)
        if not goes:
            self._stays.add(place.key)
        if is_new and self.ordinal != BY_HAND:
            self.manager.made(storage.full_nbytes)
        return saved

    def give(self, storage: SwappedStorage) -> bool:
        """Let a later group move it, if it only waits here. See [Note: outputs that two groups save]."""
        never_leaves = storage.key in self._stays or (self.link is not None and self.link.after is None)
        waits = storage.state is State.DEVICE and storage.memory is None
        return waits and not never_leaves and self._storages.pop(storage.key, None) is not None

    def _is_of_parameter(self, x: Tensor) -> bool:
        """Also of what a sharded module shows in the place of one: a leaf that has a gradient."""
        platform = self.platform
        base = platform.view_base(x)
        return any(
            platform.is_parameter(each) or (platform.is_leaf(each) and platform.requires_grad(each))
            for each in (x, base)
            if each is not None
        )

    def choose(self, x: Tensor, tag: str | None, *, fused: bool) -> None:
        """What is over the memory of ``x`` leaves."""
        place = self.platform.storage_place(x)
        if place is not None:
            self._chosen[place.key] = (tag, fused)

    def tag_of(self, storage: SwappedStorage) -> str | None:
        """What messages call it beside its number."""
        return self._chosen.get(storage.key, (None, False))[0]

    def protect(self, tensors: Any) -> None:
        """Tensors in containers, which are alive anyway: what is over their memory stays."""
        platform = self.platform
        for x in tensors_in(lambda x: is_local_wrapper(x) or platform.is_tensor(x), tensors):
            place = platform.storage_place(x.__hp_local__() if is_local_wrapper(x) else x)
            if place is not None:
                self._protected.add(place.key)

    def protected(self) -> list[SwappedStorage]:
        """What it has saved of that."""
        return [storage for storage in self._living() if storage.key in self._protected]

    @property
    def is_alive(self) -> bool:
        """Whether backward may still ask for something."""
        return len(self._storages) > 0

    @property
    def is_on_host(self) -> bool:
        """Whether something of it is there."""
        return any(storage.state is State.HOST for storage in self._living())

    def _living(self) -> list[SwappedStorage]:
        return list(self._storages.values())

    def has_stayed(self) -> None:
        """Backward has come before it started for the host."""
        self.movable = [
            storage.full_nbytes
            for storage in self._living()
            if self._may_leave(storage) and storage.is_worth_it()
        ]

    def stay(self) -> None:
        """Backward has come before it was waited for: its tensors are there still. Nobody will read what is being copied."""
        for storage in self._living():
            if storage.state is State.TO_HOST:
                storage.move(State.DEVICE)
                storage.source = None
        while self._leaving:
            for parcel in self._leaving.popleft()[-1]:
                parcel.forsake()

    def _may_leave(self, storage: SwappedStorage) -> bool:
        return storage.key not in self._protected and storage.key not in self._stays

    @property
    def nbytes(self) -> tuple[int, int]:
        """Of what it has saved and may move: on the device, and on the host only."""
        on_host = sum(
            storage.nbytes for storage in self._living() if storage.state in (State.HOST, State.TO_DEVICE)
        )
        return self._device_nbytes(self._living()), on_host

    def device_nbytes(self, device: str) -> int:
        """On one device."""
        return self._device_nbytes(storage for storage in self._living() if storage.device == device)

    def _device_nbytes(self, storages: Iterable[SwappedStorage]) -> int:
        return sum(
            storage.nbytes or storage.full_nbytes for storage in storages if storage.state is not State.HOST
        )

    # --- to the host
    def launch_offload(self, stream: Any = None) -> None:
        """Begin to copy, on ``stream`` or the one of copies. Nothing happens to what is not worth it, or has begun."""
        leaving = {
            key: storage
            for key, storage in list(self._storages.items())
            if storage.state is State.DEVICE
            and storage.parcel is None
            and self._may_leave(storage)
            and (key in self._chosen or not self.only_chosen)
        }
        fused = {id(leaving[key]) for key in leaving if self._chosen.get(key, ("", self.fused))[1]}
        for device, storages in _by_device(leaving.values()).items():
            worth = [storage for storage in storages if storage.is_worth_it()]
            self.movable.extend(storage.full_nbytes for storage in worth)
            worth = self._not_staying(worth)
            copies, pool = self.manager.copies_of(device), self.manager.pool_of(device)
            alone = [storage for storage in worth if id(storage) not in fused]
            packed = [storage for storage in worth if id(storage) in fused]
            made = [
                *parcels(self.platform, copies, alone, fused=False),
                *parcels(self.platform, copies, packed, fused=True),
            ]
            for portion in portions(made, _PORTIONS):
                event = copies.to_host([parcel.pair_out(pool) for parcel in portion], stream)
                self._leaving.append((device, copies, event, weakref.WeakSet(portion)))

    def _not_staying(self, worth: list[SwappedStorage]) -> list[SwappedStorage]:
        """Of what may go, all beside what stays."""
        places = set(fitting([storage.full_nbytes for storage in worth], self.stays_nbytes))
        stay = [worth[place] for place in places]
        self._stays.update(storage.key for storage in stay)
        self.stays_nbytes = self.stays_nbytes - sum(storage.full_nbytes for storage in stay)
        return [storage for place, storage in enumerate(worth) if place not in places]

    def wait_offload(self) -> None:
        """Let the computation wait until the bytes are on the host, and let go of those on the device."""
        while self._leaving:
            self.wait_portion()

    def wait_portion(self) -> None:
        """Likewise, for the part that has left first."""
        _, copies, event, portion = self._leaving.popleft()
        copies.wait(event)
        for parcel in portion:
            parcel.left()

    @property
    def is_leaving(self) -> bool:
        """Whether it is on its way to the host."""
        return bool(self._leaving)

    def leaving_nbytes(self, device: str) -> int:
        """Of what is on the way."""
        return sum(
            parcel.nbytes for place, _, _, portion in self._leaving if place == device for parcel in portion
        )

    # --- and back
    def launch_load(self, stream: Any = None) -> None:
        """Begin to copy back what is on the host, on ``stream`` or the one of copies."""
        for device, made in self._on_host().items():
            copies, pairs = self.manager.copies_of(device), [parcel.pair_back() for parcel in made]
            self._coming.append((copies, copies.to_device(pairs, stream)))
            for parcel, (target, _) in zip(made, pairs, strict=True):
                parcel.came(target)

    def host_nbytes(self) -> dict[str, int]:
        """By device: bytes that would come."""
        return {device: sum(parcel.nbytes for parcel in made) for device, made in self._on_host().items()}

    def _on_host(self) -> dict[str, list[Parcel]]:
        found: dict[str, dict[int, Parcel]] = {}
        for storage in self._living():
            if storage.state is State.HOST:
                found.setdefault(storage.device, {})[id(storage.parcel)] = storage.parcel
        return {device: list(made.values()) for device, made in found.items()}

    def wait_load(self) -> None:
        """Let the computation wait for it."""
        for copies, event in self._coming:
            copies.wait(event)
        self._coming.clear()
        for storage in self._living():
            if storage.state is State.TO_DEVICE:
                storage.move(State.DEVICE)

    @property
    def is_coming(self) -> bool:
        """Whether it is on its way to the device."""
        return bool(self._coming)

    def require(self, storage: SwappedStorage) -> None:
        """``storage`` is on the device after this, for the computation, which has come to this group. It may move with another one."""
        self.manager.wanted(self)
        mover: Group = storage.group
        if storage.state is State.TO_HOST:  # the tensors are there still
            storage.move(State.DEVICE)
        if storage.state is State.HOST:
            mover.launch_load()
        if storage.state is State.TO_DEVICE:
            mover.wait_load()

    def release(self) -> None:
        """Let go of what came back, whose bytes are on the host still: for another backward through the same graph."""
        for storage in self._living():
            if storage.state is State.DEVICE and storage.memory is not None:
                storage.forget()


def _by_device(storages: Iterable[SwappedStorage]) -> dict[str, list[SwappedStorage]]:
    found: dict[str, list[SwappedStorage]] = {}
    for storage in storages:
        found.setdefault(storage.device, []).append(storage)
    return found
