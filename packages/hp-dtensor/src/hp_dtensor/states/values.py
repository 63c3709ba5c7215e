"""One tensor of a state: found by its name, made whole from its pieces, cut from what is given, written to its place.

Everything here goes by the placements of DTensors, whatever they are, and moves shards that wait on the host to the mesh's
device for as long as they communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.creation import distribute_tensor
from hp_dtensor.native import DTensor
from hp_dtensor.states.options import StateDictOptions
from hp_platform.mesh import DeviceMesh
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


def parameters_by_name(platform: Platform, model: Any) -> dict[str, Any]:
    """All parameters under all of their names."""
    named = platform.named_parameters(model, remove_duplicate=False)
    return {platform.unwrapped_name(name): parameter for name, parameter in named}


def is_frozen(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether it is the name of a parameter that asks for no gradient."""
    return name in parameters and not parameters[name].requires_grad


def device_of_mesh(platform: Platform, mesh: DeviceMesh) -> str:
    """Where tensors must lie to travel over the mesh."""
    return platform.device(mesh.device_type).current()


def whole_of(platform: Platform, x: DTensor) -> Tensor:
    """The whole tensor, in memory of its own, on the mesh's device. Communication: what redistributing to Replicate needs."""
    local = x.to_local()
    with platform.no_grad():
        whole = _travelling(platform, x).full_tensor()
        if platform.data_ptr(whole) == platform.data_ptr(local):  # nothing had to move
            whole = platform.clone(whole)
        return platform.detach(whole)


def copy_on(platform: Platform, x: Tensor, device: str) -> Tensor:
    """A copy of a plain tensor or DTensor (then of its piece) in memory of its own."""
    local = platform.detach(x.to_local() if isinstance(x, DTensor) else x)
    moved = platform.to_device(local, device)
    if platform.device_of(local) == platform.device_of(moved):
        moved = platform.clone(moved)
    return like(x, moved) if isinstance(x, DTensor) else moved


def like(x: DTensor, local: Tensor) -> DTensor:
    """The DTensor around another piece that lies as ``x`` does."""
    made: DTensor = DTensor.from_local(local, x.device_mesh, x.placements, shape=tuple(x.shape))
    return made


def check_value(platform: Platform, name: str, value: Any, target: Tensor) -> None:
    """ValueError if ``value`` cannot be written to ``target``; RuntimeError if the target has no memory. No communication.

    ``value`` may also be an :class:`hp_dtensor.states.broadcast.Announced`, a whole tensor that is still to come.
    """
    if platform.device_of(target.to_local() if isinstance(target, DTensor) else target) == "meta":
        raise RuntimeError(
            f"{name!r} is on the meta device and has no memory to load into: materialise the model first"
        )
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"the value of {name!r} must be a tensor, got {type(value).__name__}")
    given, expected = tuple(value.shape), tuple(target.shape)
    if isinstance(value, DTensor):
        check_reachable(name, value, target)
    if given == expected:
        return
    if not isinstance(target, DTensor):
        raise ValueError(f"{name!r} has shape {expected}, the given value {given}: give it in this shape")
    piece = tuple(target.local_shape)
    if isinstance(value, DTensor) or given != piece or not platform.is_tensor(value):
        raise ValueError(
            f"{name!r} has shape {expected}, its shard on rank {target.device_mesh.get_rank()} {piece}; the given value has "
            f"{given}, which is neither"
        )


def check_reachable(name: str, value: DTensor, target: Tensor) -> None:
    """ValueError if a DTensor cannot be redistributed to where the target lies."""
    if not isinstance(target, DTensor):
        return
    theirs, ours = value.device_mesh, target.device_mesh
    if set(theirs.rank_list) != set(ours.rank_list):
        raise ValueError(
            f"{name!r} lies on the ranks of {ours}, the given DTensor on those of {theirs}: bring it there with "
            "hp_dtensor.transfer, or give the whole tensor"
        )


def piece_of(platform: Platform, value: Tensor, target: Tensor) -> Tensor:
    """What of ``value`` belongs in the memory of ``target`` on this rank; on any device, perhaps the value's own memory.

    Communication: none for plain values and for DTensors that lie as the target does; else what the redistribution needs.
    """
    with platform.no_grad():
        if not isinstance(target, DTensor):
            return whole_of(platform, value) if isinstance(value, DTensor) else platform.detach(value)
        if isinstance(value, DTensor):
            if value.placements == target.placements and value.device_mesh == target.device_mesh:
                return platform.detach(value.to_local())
            moved = _travelling(platform, value).redistribute(target.device_mesh, target.placements)
            return platform.detach(moved.to_local())
        value = platform.detach(value)
        if tuple(value.shape) == tuple(target.shape):
            return distribute_tensor(value, target.device_mesh, target.placements).to_local()
        return value


def write(platform: Platform, target: Tensor, piece: Tensor) -> None:
    """Write a piece (cast, from any device) into the memory of ``target``."""
    local = target.to_local() if isinstance(target, DTensor) else target
    platform.copy_(local, platform.to_device(piece, platform.device_of(local)))


def _travelling(platform: Platform, x: DTensor) -> DTensor:
    """The DTensor outside of the graph, on the device of its mesh."""
    local = platform.detach(x.to_local())
    if platform.device_of(local).partition(":")[0] != x.device_mesh.device_type:
        local = platform.to_device(local, device_of_mesh(platform, x.device_mesh))
    return like(x, local)


def read(platform: Platform, value: Any, options: StateDictOptions, *, keeps: bool) -> Any:
    """One value as the options want it. All ranks call; those that do not keep it take part, and get None."""
    if isinstance(value, DTensor) and options.full_state_dict:
        whole = whole_of(platform, value)
        if not keeps:
            return None
        return platform.to_device(whole, "cpu") if options.cpu_offload else whole
    if not keeps:
        return None
    if not platform.is_tensor(value):
        return value
    if options.cpu_offload:
        return copy_on(platform, value, "cpu")
    return platform.clone(platform.detach(value)) if options.full_state_dict else value
