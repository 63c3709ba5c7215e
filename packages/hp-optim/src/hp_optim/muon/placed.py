"""What of a parameter and its gradient lies on this rank, and where its matrices are orthogonalised."""

from __future__ import annotations

from typing import Any

from hp_dtensor.placements import Partial
from hp_dtensor.spec import Spec
from hp_optim.checks import NAMES, PARAMS
from hp_optim.groups import Group
from hp_optim.muon.parts import held_by_ranks
from hp_optim.offload.home import StateHome
from hp_optim.offload.transfers import HOST
from hp_optim.pieces import like, local_of
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

BUFFER = "momentum_buffer"
"""Key of a parameter's state."""


def named(group: Group) -> list[tuple[Any, str]]:
    """The group's parameters with their names, empty ones where it has none. None of both if it is only options."""
    parameters = group.get(PARAMS, ())
    return list(zip(parameters, group.get(NAMES, [""] * len(parameters)), strict=True))


def rate_on(platform: Platform, lr: Any, device: str) -> Any:
    """A learning rate where the parameters lie. One on the host is read for those on a device: a copy of it would wait for the device."""
    if not platform.is_tensor(lr) or platform.device_of(lr) == device:
        return lr
    if platform.device_of(lr) == HOST:
        return float(platform.to_numpy(platform.detach(lr)).item())
    return platform.to_device(lr, device)


def momentum_of(
    platform: Platform,
    home: StateHome,
    state: dict[str, Any],
    parameter: Any,
    gradient: Tensor,
    storage: str,
) -> Tensor:
    """The local momentum, where it belongs for a parameter on ``storage``; made with the first gradient, and never narrower."""
    if BUFFER not in state:
        state[BUFFER] = like(parameter, home.zeros(tuple(gradient.shape), gradient.dtype, storage))
    held = local_of(state[BUFFER])
    if held.dtype != gradient.dtype and platform.itemsize(held.dtype) < platform.itemsize(gradient.dtype):
        home.landed()
        held = platform.cast(held, gradient.dtype)
        state[BUFFER] = like(parameter, held)
    settled = home.settled(held, storage)
    if settled is not held:
        state[BUFFER] = like(parameter, settled)
    return settled


def device_of_iteration(platform: Platform, spec: Any, storage: str) -> str:
    """Where the matrices of a parameter are orthogonalised: on the kind of device that its mesh says."""
    kind = storage.partition(":")[0] if spec is None else spec.mesh.device_type
    return storage if kind == storage.partition(":")[0] else platform.device(kind).current()


def check_momentum(state: dict[str, Any] | None, parameter: Any, label: str) -> None:
    """RuntimeError for a momentum that was loaded from other shards, be they of the same shape: values of other elements."""
    if not state:
        return
    held = state[BUFFER]
    found, local = local_of(held), local_of(parameter)
    way_out = "a state dict of other shards is loaded through hp_dtensor.load"
    if tuple(found.shape) != tuple(local.shape):
        raise RuntimeError(
            f"Muon: the momentum of parameter {label!r} of shape {tuple(parameter.shape)} has shape {tuple(found.shape)} on this "
            f"rank, which holds {tuple(local.shape)} of it: {way_out}"
        )
    spec, own = getattr(held, "_spec", None), getattr(parameter, "_spec", None)
    if spec is not None and own is not None and not _holds_the_same(spec, own):
        raise RuntimeError(
            f"Muon: the momentum of parameter {label!r} of shape {tuple(parameter.shape)} lies as {spec}, so a rank has other "
            f"elements of it than of the parameter, {own}: {way_out}"
        )


def _holds_the_same(spec: Spec, own: Spec) -> bool:
    """Whether every rank, as all of them must find the same, has the same elements by both; each may have a mesh of its own."""
    if spec is own:
        return True
    is_sum = any(isinstance(placement, Partial) for placement in spec.placements)
    return not is_sum and spec.shape == own.shape and held_by_ranks(spec) == held_by_ranks(own)
