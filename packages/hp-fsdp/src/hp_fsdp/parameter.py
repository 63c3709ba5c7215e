"""One parameter under care: the shard that the optimizer sees, and the whole tensor that forward sees for a while."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.layout import Slot
from hp_fsdp.places import Places
from hp_fsdp.policy import Precision
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

OWNER_MARK = "_hp_fsdp_owner"
"""Attribute of a sharded parameter that says who shards it. A plain text: it travels through pickles harmlessly."""
SUCCESSOR = "_hp_fsdp_successor"
"""Attribute of a parameter that was sharded, the whole one of before: the :class:`ManagedParameter` that took its place. A module
outside of the unit may still hold it (a tie), and is given the successor when it is sharded itself."""


@dataclass(frozen=True)
class Owner:
    """A place where a parameter hangs. A tied one has several."""

    module: Any
    attribute: str
    name: str
    """Dotted, from the unit's module."""


class ManagedParameter:
    """[Note: what the module holds] A DTensor whose local tensor is the shard takes the parameter's place in the user's module
    once, in every place of a tied one; from then on that object stays. Everything in here works on its local tensor.

    [Note: one whole tensor for ever] The whole tensor is one object for the life of the unit. Re-sharding frees the memory
    below it and gathering gets memory back there, so that what autograd has saved in forward is valid again in backward.
    """

    def __init__(self, platform: Platform, parameter: Any, owners: tuple[Owner, ...]) -> None:
        self.platform = platform
        self.parameter = parameter
        self.owners = owners
        self.shape: tuple[int, ...] = tuple(parameter.shape)
        self.dtype = parameter.dtype
        self.slot: Slot | None = None
        """Place in the unit's rows; None for a scalar, which is replicated."""
        self.unsynced: Tensor | None = None
        """Gradient of the whole parameter from backwards without synchronisation, in the dtype of the reduction."""
        self.wire_dtype = parameter.dtype
        self.full: Any = None
        self._storage: Any = None
        self._storage_nbytes = 0
        self._watched = False

    @property
    def name(self) -> str:
        """Dotted, from the unit's module; a tied parameter has the first of its names."""
        return self.owners[0].name

    @property
    def trains(self) -> bool:
        """Whether a gradient is asked for, now."""
        return bool(self.parameter.requires_grad)  # of a DTensor: of its local tensor

    # --- the shard
    @property
    def shard(self) -> Tensor:
        """The local tensor of :attr:`parameter`: what an optimizer updates, and where gradients of shards are kept."""
        return self.parameter.to_local()

    def cut(self, slot: Slot | None, places: Places) -> None:
        """Keep this rank's chunk only, in memory of its own (without a ``slot`` all of it), as a DTensor in all places."""
        platform = self.platform
        chunk = platform.detach(self.parameter)
        if slot is not None:
            rank = places.shard_rank
            length = slot.local_shape(rank)[0]
            chunk = platform.clone(platform.narrow(chunk, 0, slot.local_start(rank), length))
        chunk = platform.to_device(chunk, places.device)
        setattr(self.parameter, SUCCESSOR, self)
        dtensor = DTensor.from_local(chunk, places.mesh, places.placements(slot is not None), shape=self.shape)
        self.parameter = platform.parameter(dtensor, requires_grad=self.trains)
        self.show_shard()

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``."""
        return self.shape if self.slot is None else self.slot.local_shape(rank)

    # --- the whole tensor
    def make_full(self, precision: Precision, device: str) -> None:
        """Make the whole tensor in the dtype of the computation, without memory below it."""
        platform = self.platform
        dtype = precision.compute_dtype(self.dtype)
        self.wire_dtype = precision.wire_dtype(self.dtype)
        # A scalar is stored as what it is; a sharded parameter as one line per rank, which is how gathering delivers it.
        stored = self.shape if self.slot is None else (self.slot.num_ranks, self.slot.numel)
        self._storage = platform.empty(stored, dtype, device)
        self._storage_nbytes = math.prod(stored) * platform.itemsize(dtype)
        whole = self._storage
        if self.slot is not None:
            whole = platform.narrow(platform.reshape(whole, self.slot.padded_shape), 0, 0, self.shape[0])
        self.full = platform.detach(whole)
        self._watched = False
        self.free()

    def allocate(self) -> Tensor:
        """Get memory below the whole tensor, for the caller to fill: ``(ranks, chunk)``, or 0-d for a scalar."""
        if self._storage_nbytes:
            self.platform.resize_storage_(self._storage, self._storage_nbytes)
        return self._storage

    def free(self) -> None:
        """Give the memory back. The tensor and what views it stay as objects."""
        if self._storage_nbytes:
            self.platform.resize_storage_(self._storage, 0)

    @property
    def compute_dtype(self) -> Any:
        """Dtype of the whole tensor."""
        return self.full.dtype

    def show_full(self, on_gradient: Callable[[], None]) -> None:
        """Put the whole tensor where the parameter hangs; ``on_gradient()`` runs when a backward has added to its gradient."""
        platform = self.platform
        if platform.requires_grad(self.full) != self.trains:
            platform.set_requires_grad_(self.full, self.trains)
        if self.trains and not self._watched:
            platform.register_post_accumulate_grad_hook(self.full, lambda _: on_gradient())
            self._watched = True
        for owner in self.owners:
            platform.set_parameter(owner.module, owner.attribute, self.full)

    def show_shard(self) -> None:
        """Put the shard back where the parameter hangs."""
        for owner in self.owners:
            self.platform.set_parameter(owner.module, owner.attribute, self.parameter)

    # --- gradients of the whole tensor
    def take_gradient(self) -> Tensor | None:
        """The gradient of the whole parameter since the last synchronisation, in the dtype of the reduction, and forget it."""
        platform = self.platform
        found = platform.get_grad(self.full)
        total = self.unsynced
        if found is not None:
            platform.set_grad(self.full, None)
            found = platform.cast(platform.detach(found), self.wire_dtype)
            total = found if total is None else total + found
        self.unsynced = None
        return total

    def keep_gradient(self) -> None:
        """Set the gradient aside until a backward that synchronises."""
        self.unsynced = self.take_gradient()

    def add_to_shard_gradient(self, gradient: Tensor) -> None:
        """Add to ``parameter.grad``, in the original dtype."""
        platform = self.platform
        gradient = platform.cast(gradient, self.dtype)
        before = platform.get_grad(self.shard)
        if before is None:
            platform.set_grad(self.shard, gradient)
        else:
            platform.add_(before, gradient)
