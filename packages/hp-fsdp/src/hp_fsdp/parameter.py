"""One parameter under care: the shard that the optimizer sees, and the whole tensor that forward sees for a while."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor import DTensor
from hp_dtensor.gradients import HOOK_KEEPER
from hp_dtensor.marks import defer_reductions
from hp_dtensor.module_tensors import PIECE_DEVICE
from hp_fsdp.extension import EXTENSION, has_extension
from hp_fsdp.faces import Faces
from hp_fsdp.gradient_hooks import GradientHooks
from hp_fsdp.gradient_listening import Listener, told_of_gradients
from hp_fsdp.layout import Slot
from hp_fsdp.marks import OWNER_MARK, SUCCESSOR
from hp_fsdp.origin import Origin
from hp_fsdp.owner import Owner
from hp_fsdp.places import Places
from hp_fsdp.summands import Summands
from hp_fsdp.wide_gradients import WideGradient, wide_weight
from hp_platform.platform import Platform
from hp_platform.protocols.flat_shards import FLAT_SHARDS
from hp_platform.protocols.tensor import DType, Tensor


class ManagedParameter:
    """[Note: what the module holds] A DTensor whose local tensor is the shard takes the parameter's place in the user's module
    once, in every place of a tied one; from then on that object stays, unless the user puts another there (see
    :meth:`adopt`). Everything in here works on its local tensor.

    [Note: one whole tensor for ever] The whole tensor is one object for the life of the unit. Re-sharding frees the memory
    below it and gathering gets memory back there, so that what autograd has saved in forward is valid again in backward.

    [Note: whole without a copy] Where this rank's shard is the whole parameter (a scalar, one on replicas only, a group of one
    rank) and has the computation's dtype, the whole tensor is another face of the shard's memory, and nothing is gathered.
    """

    def __init__(
        self,
        platform: Platform,
        parameter: Any,
        owners: tuple[Owner, ...],
        dim: int | None = 0,
        *,
        stays: bool = False,
    ) -> None:
        """``dim``: which dim is sharded (of the local tensor, if ``parameter`` is a DTensor); None: replicated. ``stays``: see
        [Note: compat] in :mod:`hp_fsdp.summands`; ``dim`` is None then.
        """
        self.platform = platform
        self._owners = owners
        self.origin = Origin(platform, parameter)
        self.parameter = parameter
        self.shape = self.origin.local_shape
        self.stays = stays
        self.gathers_summands = False
        """Whether those of its uses that need a reduction are reduced with others."""
        self.summands: Summands | None = None
        self.is_extended = not stays and has_extension(platform, parameter, self.origin.local(parameter))
        """Whether it says itself what is gathered of it; see :mod:`hp_fsdp.extension`."""
        self.extension: Any = getattr(parameter, EXTENSION, None)
        """The object with its hooks; None: they are methods of its class, if there are any."""
        self.dim = dim if self.shape else None
        self.dtype: DType = parameter.dtype
        self.slot: Slot | None = None
        """Place in the unit's rows; None if it is replicated."""
        self.own_shape: tuple[int, ...] = self.shape
        """Of this rank's shard."""
        self.own_numel = math.prod(self.shape)
        self.is_padded = False
        """Whether the shard is shorter than its place in the row."""
        self.unsynced: Tensor | None = None
        """Gradient of the whole parameter from backwards without synchronisation, in the dtype of the reduction."""
        self.wide = WideGradient(platform)
        self.compute_dtype: DType = parameter.dtype
        self.reduce_dtype: DType = parameter.dtype
        self.has_wide_gradient = False
        """Whether ``linear`` gives its gradient in :attr:`reduce_dtype`; see [Note: wide weight gradients]."""
        self.full: Any = None
        """The whole tensor, a leaf; of a DTensor the local one."""
        self.is_alias = False
        """Whether it is another face of the shard; see [Note: whole without a copy]."""
        self.gradient_hooks = GradientHooks()
        self.faces = Faces(platform)
        """Of its unit."""
        self.shown: Any = None
        """What stands for the whole tensor in the module."""
        self._stand_in: Any = None
        self._find_places()
        self._is_watched = False
        self._is_exchanged = False
        """Whether another object has been adopted, and nobody was told yet."""

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Where it hangs."""
        return self._owners

    @owners.setter
    def owners(self, owners: tuple[Owner, ...]) -> None:
        self._owners = owners
        self._find_places()
        self.faces.forget()

    def _find_places(self) -> None:
        platform, first = self.platform, self._owners[0]
        self.setters = [platform.parameter_setter(owner.module, owner.attribute) for owner in self._owners]
        """What puts something in each of its places."""
        self.getter = platform.parameter_getter(first.module, first.attribute)
        """What stands in the first of them."""

    @property
    def name(self) -> str:
        """Dotted, from the unit's module; a tied parameter has the first of its names."""
        return self.owners[0].name

    @property
    def trains(self) -> bool:
        """Whether a gradient is asked for, now."""
        return self.platform.requires_grad(self.parameter)

    # --- the shard
    @property
    def shard(self) -> Tensor:
        """The local tensor of :attr:`parameter`: what an optimizer updates, and where gradients of shards are kept."""
        return self.parameter.to_local()

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``."""
        return self.shape if self.slot is None else self.slot.local_shape(rank)

    def cut(self, slot: Slot | None, places: Places, device: str) -> None:
        """Keep this rank's chunk only, in memory of its own on ``device`` (without a ``slot`` all of it), in all places."""
        platform, before = self.platform, self.parameter
        chunk = self.origin.local(before)
        if slot is not None:
            rank = places.shard_rank
            length = slot.local_shape(rank)[slot.dim]
            chunk = platform.clone(platform.narrow(chunk, slot.dim, slot.local_start(rank), length))
        if not platform.device_of(chunk).startswith("meta"):
            chunk = platform.to_device(chunk, device)
        trains = self.trains
        setattr(before, SUCCESSOR, self)
        self.parameter = platform.parameter(self.origin.sharded(chunk, places, slot), requires_grad=trains)
        self.faces.forget()
        if device != places.device:
            setattr(self.parameter, PIECE_DEVICE, device)
        self.show_shard()

    def adopt(self) -> bool:
        """Take what the user has put in the parameter's place since; whether anything has changed since the last time.

        ``module.to_empty`` and ``load_state_dict(assign=True)`` put new objects there, one for each place of a tied one:
        the first place counts. RuntimeError for something that is no DTensor with the parameter's placements.
        """
        self._look()
        is_exchanged, self._is_exchanged = self._is_exchanged, False
        return is_exchanged

    def tie(self) -> None:
        """Let all places hold one object again, that of the first place; :meth:`adopt` will tell whether it is another one."""
        self._look()
        self.show_shard()

    def _look(self) -> None:
        found = self.getter()
        if found is self.parameter or (found is self._stand_in and found is not None):
            return
        expected = self.parameter
        if (
            not isinstance(found, DTensor)
            or tuple(found.shape) != tuple(expected.shape)
            or found.device_mesh != expected.device_mesh
            or tuple(found.placements) != tuple(expected.placements)
        ):
            what = f"a {type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}"
            raise RuntimeError(
                f"parameter {self.name!r} was exchanged after fully_shard, for {what}: it must stay a DTensor of shape "
                f"{tuple(expected.shape)} with placements {tuple(expected.placements)}; load values with set_model_state_dict"
            )
        setattr(found, OWNER_MARK, getattr(expected, OWNER_MARK))
        setattr(found, HOOK_KEEPER, self.gradient_hooks)
        setattr(found, FLAT_SHARDS, getattr(expected, FLAT_SHARDS, None))
        self.parameter = found
        self._is_exchanged = True
        self.faces.forget()
        self.show_shard()

    # --- the whole tensor
    @property
    def whole_nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.platform.itemsize(self.compute_dtype)

    def show_stand_in(self, get: Callable[[], None]) -> None:
        """Put there what becomes the whole tensor when something is done with it; ``get()`` shows that."""
        if self._stand_in is None:
            self._stand_in = self._make_stand_in(get)
        for put in self.setters:
            put(self._stand_in)

    def _make_stand_in(self, get: Callable[[], None]) -> Any:
        def whole() -> Any:
            get()
            return self.shown

        platform, shown = self.platform, self.shown
        return platform.stand_in(tuple(shown.shape), shown.dtype, platform.device_of(self.full), whole)

    def set_whole(self, whole: Tensor, *, is_alias: bool) -> None:
        """Let the memory of ``whole`` (in the shape of the parameter) be the whole tensor's."""
        self.shown = self.origin.shown(whole)
        self.full = self.origin.leaf(self.shown)
        if self.has_wide_gradient and self.shown is self.full and len(self.shape) == 2:
            self.shown = wide_weight(self.platform, self.full, self.reduce_dtype, self.wide.offer)
        self.is_alias = is_alias
        self._is_watched = False
        self._stand_in = None
        self.faces.forget()

    def follow_shard(self) -> None:
        """Where the whole tensor is another face of the shard: of the memory that the shard has now."""
        platform = self.platform
        if platform.data_ptr(self.full) != platform.data_ptr(self.shard):
            platform.set_data_(self.full, platform.detach(self.shard))
            if self.summands is not None:
                self.summands.follow()

    def show_full(self, listener: Listener) -> None:
        """Put the whole tensor where the parameter hangs; ``listener`` is told when a backward has added to its gradient."""
        platform, trains = self.platform, self.trains
        if platform.requires_grad(self.full) != trains:
            platform.set_requires_grad_(self.full, trains)
        if trains and not self._is_watched:
            came = told_of_gradients(listener, self.wide if self.has_wide_gradient else None)
            platform.register_post_accumulate_grad_hook(self.full, came)
            self._is_watched = True
            mesh = self.origin.mesh
            if self.gathers_summands and mesh is not None:
                kept = {} if self.summands is None else self.summands.kept
                self.summands = Summands(platform, mesh, self.full, came, kept)
                defer_reductions(self.shown, self.summands.leaf)
        for put in self.setters:
            put(self.shown)

    def show_shard(self) -> None:
        """Put the shard back where the parameter hangs."""
        for put in self.setters:
            put(self.parameter)

    # --- gradients of the whole tensor
    def take_gradient(self) -> Tensor | None:
        """The gradient of the whole parameter since the last synchronisation, and forget it.

        In the dtype in which it came, or in that of the reduction where several were added up.
        """
        return self.with_others(self.platform.take_grads([self.full])[0])

    def with_others(self, found: Tensor | None) -> Tensor | None:
        """What autograd has added up, and all others, which are forgotten."""
        total = self.unsynced
        wide = self.wide.take()
        if wide is not None:
            total = wide if total is None else total + wide
        if found is not None:
            total = found if total is None else total + self.platform.cast(found, self.reduce_dtype)
        self.unsynced = None
        return total

    def keep_gradient(self) -> None:
        """Set the gradient aside, in the dtype of the reduction, until a backward that synchronises."""
        found = self.take_gradient()
        self.unsynced = None if found is None else self.platform.cast(found, self.reduce_dtype)
        if self.summands is not None:
            self.summands.keep()

    def forget_backward(self) -> None:
        """Drop what the running backward has given; what waits from others stays."""
        self.wide.take()
        if self.full is not None:
            self.platform.set_grad(self.full, None)
        if self.summands is not None:
            self.summands.forget_backward()

    def forget_gradients(self) -> None:
        """Of the whole parameter."""
        self.unsynced = None
        self.forget_backward()
        if self.summands is not None:
            self.summands.kept = {}
