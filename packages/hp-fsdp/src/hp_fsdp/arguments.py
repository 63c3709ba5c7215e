"""Checks of what ``fully_shard`` is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor import Shard
from hp_fsdp.unit import unit_of
from hp_platform import process_groups
from hp_platform.forwards import is_container
from hp_platform.mesh import DeviceMesh, init_device_mesh
from hp_platform.platform import Platform


def checked_modules(platform: Platform, given: Any) -> list[Any]:
    """The modules of a unit: of a list those that are not inside of another one. ValueError for anything that is none."""
    listed = isinstance(given, (list, tuple)) and not platform.is_module(given)
    if listed and not given:
        raise ValueError("fully_shard takes a module or a list of modules, got an empty list")
    modules = list(given) if listed else [given]
    for index, module in enumerate(modules):
        if not platform.is_module(module):
            where = f" at index {index}" if listed else ""
            raise ValueError(
                f"fully_shard takes a module of {platform.platform_type.value}, got {type(module).__name__}{where}"
            )
    inside = {id(each) for module in modules for name, each in platform.named_modules(module) if name}
    roots = list({id(module): module for module in modules if id(module) not in inside}.values())
    for module in roots:
        if unit_of(module) is not None:
            raise ValueError(f"{type(module).__name__} is sharded already: call fully_shard once per module")
        if is_container(platform, module):
            raise ValueError(
                f"a {type(module).__name__} has no forward, so nothing would gather its parameters: call fully_shard on each of its "
                "modules, or on the module that it hangs in"
            )
    return roots


def checked_mesh(platform: Platform, modules: Sequence[Any], mesh: Any) -> DeviceMesh:
    """The mesh; without one, all ranks on the first parameter's kind of device."""
    if mesh is None:
        found = next((p for module in modules for _, p in platform.named_parameters(module)), None)
        device = "meta" if found is None else platform.device_of(found).partition(":")[0]
        kind = None if device == "meta" else device
        return init_device_mesh(kind, (process_groups.ensure_initialized(kind).size,))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh must be a hp_platform.DeviceMesh or None, got {type(mesh).__name__}: make one with "
            "init_device_mesh(device_type, (num_ranks,))"
        )
    return mesh


def checked_reshard(given: Any, num_shards: int) -> bool | int:
    """``reshard_after_forward``: a bool, or the number of ranks to cut among, which must divide the shard group."""
    if isinstance(given, bool):
        return given
    if not isinstance(given, int):
        raise ValueError(f"reshard_after_forward must be True, False or a number of ranks, got {given!r}")
    if given < 1 or num_shards % given:
        raise ValueError(
            f"reshard_after_forward={given} must divide the {num_shards} ranks that share the parameters: after forward every "
            "so many neighbours hold all of them"
        )
    # Among all of them: that is the usual cut. Alone: whole parameters are kept.
    return True if given == num_shards else False if given == 1 else given


def checked_parameters(platform: Platform, name: str, given: Iterable[Any] | None) -> set[int]:
    """Identities of parameters given as ``ignored_params`` or ``replicate_params``."""
    if given is not None and (platform.is_tensor(given) or not isinstance(given, Iterable)):
        raise ValueError(
            f"{name} must be several parameters, such as a list or set, got {type(given).__name__}"
        )
    found = list(given) if given is not None else []
    for index, parameter in enumerate(found):
        if not platform.is_parameter(parameter):
            raise ValueError(f"{name}[{index}] must be a parameter, got {type(parameter).__name__}")
    return {id(parameter) for parameter in found}


def checked_dim(fn: Any, parameter: Any, name: str) -> int:
    """Which dim of the parameter is sharded, as ``shard_placement_fn`` says."""
    if fn is not None and not callable(fn):
        raise ValueError(
            f"shard_placement_fn must be a function from a parameter to a Shard or None, got {type(fn).__name__}"
        )
    placement = None if fn is None else fn(parameter)
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn must return a Shard or None, got {placement!r} for parameter {name!r}"
        )
    ndim = len(parameter.shape)
    if not -ndim <= placement.dim < ndim:
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for parameter {name!r} of shape {tuple(parameter.shape)}: it has no such dim"
        )
    return placement.dim % ndim


def checked_flag(name: str, given: Any) -> bool | None:
    """True, False or None."""
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"{name} must be True, False or None, got {given!r}")
    return given


def check_reach(unit: str, left: Sequence[str], asked: Mapping[str, bool]) -> None:
    """ValueError if something was asked for (name of the argument -> whether) that does not reach DTensors that are ``left``."""
    names = [name for name, is_asked in asked.items() if is_asked]
    if left and names:
        raise ValueError(
            f"{left[0]!r} of {unit} is a DTensor and stays as it is, since no mesh is given, so {names[0]} does not reach it: give the "
            f"mesh to shard over, or leave {names[0]} out"
        )
