"""What one call of a function saves for backward, and moves as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hp_platform.containers import tensors_in
from hp_platform.platform import Platform
from hp_platform.protocols.local_wrapper import is_local_wrapper
from hp_platform.protocols.tensor import Tensor
from hp_recompute.swapping.chain import Link
from hp_recompute.swapping.parcels import Parcel, parcels
from hp_recompute.swapping.storage import SavedTensor, State, SwappedStorage

BY_HAND = -1
"""The number of groups that are no part of a step."""


class Group:
    """Of a manager. It does not hold what it has saved: when the graph is freed, that is freed."""

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
        self.movable_nbytes = 0
        """Of memories that nobody else holds: those that have started for the host, or were there when backward came."""
        self.is_wanted = False
        """Whether backward has asked for something of it."""
        self._storages: weakref.WeakValueDictionary[int, SwappedStorage] = weakref.WeakValueDictionary()
        self._protected: set[int] = set()
        self._chosen: dict[int, tuple[str | None, bool]] = {}
        """By memory: what messages call it, and whether it is packed with others."""
        self._num_saved = 0
        self._leaving: list[tuple[Any, Any, list[Parcel]]] = []
        self._coming: list[tuple[Any, Any, list[Parcel]]] = []

    # --- forward
    def save(self, x: Tensor, is_swapped: Callable[[Tensor], bool] | None = None) -> SavedTensor:
        """What stands for ``x``. ``is_swapped`` is asked for what may go; None: all that may."""
        platform = self.platform
        name = f"saved tensor {self._num_saved} of {self.name}"
        self._num_saved = self._num_saved + 1
        if self._is_of_parameter(x):
            # As it is: who owns a parameter may exchange what is behind the object.
            return SavedTensor(platform, x, None, None, name)
        place = platform.storage_place(x)
        device = platform.device_of(x)
        # Not x itself, which may be an output of the node that will hold this: a cycle.
        kept = platform.detach_watched(x)
        may_go = place is not None and self.manager.copies_of(device) is not None
        if place is None or not may_go or not (is_swapped is None or is_swapped(x)):
            return SavedTensor(platform, kept, None, None, name)
        storage = self._storages.get(place.key)
        if storage is None:
            storage = SwappedStorage(platform, self, device, place.key)
            self._storages[place.key] = storage
            size = platform.storage_nbytes(x)
            if size <= self.stays_nbytes:
                self.stays_nbytes = self.stays_nbytes - size
                self._protected.add(place.key)
        saved = SavedTensor(platform, kept, place, storage, name)
        storage.add(saved)
        return saved

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
        self.movable_nbytes = sum(
            storage.full_nbytes
            for storage in self._living()
            if storage.key not in self._protected and storage.is_worth_it()
        )

    @property
    def nbytes(self) -> tuple[int, int]:
        """Of what it has saved and may move: on the device, and on the host only."""
        on_device = on_host = 0
        for storage in self._living():
            if storage.state in (State.HOST, State.TO_DEVICE):
                on_host = on_host + storage.nbytes
            if storage.state is not State.HOST:
                on_device = on_device + (storage.nbytes or storage.full_nbytes)
        return on_device, on_host

    # --- to the host
    def launch_offload(self) -> None:
        """Begin to copy. Nothing happens to what is not worth it, or has begun."""
        leaving = {
            key: storage
            for key, storage in list(self._storages.items())
            if storage.state is State.DEVICE
            and storage.parcel is None
            and key not in self._protected
            and (key in self._chosen or not self.only_chosen)
        }
        fused = {id(leaving[key]) for key in leaving if self._chosen.get(key, ("", self.fused))[1]}
        for device, storages in _by_device(leaving.values()).items():
            worth = [storage for storage in storages if storage.is_worth_it()]
            if not worth:
                continue
            self.movable_nbytes = self.movable_nbytes + sum(storage.full_nbytes for storage in worth)
            copies, pool = self.manager.copies_of(device), self.manager.pool_of(device)
            alone = [storage for storage in worth if id(storage) not in fused]
            packed = [storage for storage in worth if id(storage) in fused]
            made = [
                *parcels(self.platform, copies, alone, fused=False),
                *parcels(self.platform, copies, packed, fused=True),
            ]
            event = copies.to_host([parcel.pair_out(pool) for parcel in made])
            self._leaving.append((copies, event, made))

    def wait_offload(self) -> None:
        """Let the computation wait until the bytes are on the host, and let go of those on the device."""
        for copies, event, made in self._leaving:
            copies.wait(event)
            for parcel in made:
                parcel.left()
        self._leaving.clear()

    @property
    def is_leaving(self) -> bool:
        """Whether it is on its way to the host."""
        return bool(self._leaving)

    # --- and back
    def launch_load(self) -> None:
        """Begin to copy back what is on the host."""
        found: dict[int, Parcel] = {}
        by_device: dict[str, list[Parcel]] = {}
        for storage in self._living():
            if storage.state is State.HOST and id(storage.parcel) not in found:
                found[id(storage.parcel)] = storage.parcel
                by_device.setdefault(storage.device, []).append(storage.parcel)
        for device, made in by_device.items():
            copies = self.manager.copies_of(device)
            self._coming.append((copies, copies.to_device([parcel.pair_back() for parcel in made]), made))

    def wait_load(self) -> None:
        """Let the computation wait for it."""
        for copies, event, _ in self._coming:
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
        """``storage`` is on the device after this, for the computation."""
        self.manager.wanted(self)
        if storage.state is State.TO_HOST:  # the tensors are there still
            storage.move(State.DEVICE)
        if storage.state is State.HOST:
            self.launch_load()
        if storage.state is State.TO_DEVICE:
            self.wait_load()

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
