"""Which parameters a unit takes over: everything in its modules that no unit inside of it has, in all places where it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.marks import OWNER_MARK, STAYS, SUCCESSOR
from hp_fsdp.owner import Owner
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.unit import Unit, units_in
from hp_platform.platform import Platform


@dataclass
class Findings:
    """What a unit is to take over. Nothing has been changed yet."""

    inner: list[Unit]
    """Units inside of it."""
    new: list[tuple[Any, tuple[Owner, ...]]]
    """Parameters with their places."""
    shared: list[tuple[Unit, ManagedParameter, tuple[Owner, ...]]]
    """Parameters of inner units that also hang outside of these (ties)."""
    left: list[tuple[Any, tuple[Owner, ...]]]
    """DTensors that stay as they are: see [Note: compat] in :mod:`hp_fsdp.summands`."""
    ignored: list[Owner]
    """Places of parameters that nobody is to take over."""


def find_parameters(
    platform: Platform, modules: Sequence[Any], unit: Unit, ignored: set[int], *, leave_dtensors: bool
) -> Findings:
    """Look for them. ValueError for one that cannot be sharded: the message names it.

    ``leave_dtensors``: parameters that are DTensors stay as they are, and there may be no others beside them.
    """
    inner = list(dict.fromkeys(each for module in modules for each in units_in(platform, module)))
    for each in inner:
        each.reshard()
    keepers = {param: each for each in inner for param in each.params}
    successors = {id(param.parameter): param for param in keepers}
    found = Findings(inner, [], [], [], [])
    for parameter, owners in _places_of_parameters(platform, modules, successors).values():
        if id(parameter) in ignored:
            found.ignored.extend(owners)
            continue
        param = successors.get(id(parameter))
        if param is None:
            if leave_dtensors and getattr(parameter, STAYS, False):
                continue
            _check_parameter(platform, parameter, owners[0], unit, leave_dtensors)
            if leave_dtensors and isinstance(parameter, DTensor):
                found.left.append((parameter, owners))
                continue
            found.new.append((parameter, owners))
            continue
        keeper = keepers[param]
        if len(param.owners) < len(owners):  # tied to a module outside of the unit that shards it
            if keeper.places.mesh != unit.places.mesh:
                raise ValueError(
                    f"parameter {owners[-1].name!r} of {unit.label} is also {param.name!r} of {keeper.label}, which is sharded "
                    f"over another mesh, {keeper.places.mesh}: use one mesh for modules that share parameters"
                )
            if keeper.leaves_dtensors is not leave_dtensors:
                raise ValueError(
                    f"parameter {owners[-1].name!r} of {unit.label} is also {param.name!r} of {keeper.label}, and only one of the "
                    "calls of fully_shard for them got a mesh: give it to both, or to none"
                )
            found.shared.append((keeper, param, owners))
    if found.left and found.new:
        raise ValueError(
            f"{found.left[0][1][0].name!r} of {unit.label} is a DTensor and {found.new[0][1][0].name!r} is not: give the mesh to shard over, "
            "or (mesh=None) make all parameters DTensors, which then stay as they are"
        )
    return found


def _places_of_parameters(
    platform: Platform, modules: Sequence[Any], successors: Mapping[int, ManagedParameter]
) -> dict[int, tuple[Any, tuple[Owner, ...]]]:
    """Every parameter with all places where it hangs, in the order of registration.

    A whole one whose successor, sharded by a unit inside of the module, hangs elsewhere (a tie) counts as that.
    """
    found: dict[int, tuple[Any, tuple[Owner, ...]]] = {}
    seen: set[int] = set()
    for module in modules:
        for path, each in platform.named_modules(module):
            if id(each) in seen:
                continue
            seen.add(id(each))
            for attribute, parameter in platform.named_parameters(
                each, recurse=False, remove_duplicate=False
            ):
                owner = Owner(each, attribute, f"{path}.{attribute}" if path else attribute)
                successor = getattr(parameter, SUCCESSOR, None)
                if successor is not None and id(successor.parameter) in successors:
                    parameter = successor.parameter
                _, owners = found.get(id(parameter), (parameter, ()))
                found[id(parameter)] = (parameter, (*owners, owner))
    return found


def _check_parameter(
    platform: Platform, parameter: Any, owner: Owner, unit: Unit, leave_dtensors: bool
) -> None:
    where = f"parameter {owner.name!r} of {unit.label}"
    whole = getattr(parameter, SUCCESSOR, None)
    sharded_by = getattr(parameter if whole is None else whole.parameter, OWNER_MARK, None)
    if sharded_by is not None:
        raise ValueError(
            f"{where} is sharded by another unit already, {sharded_by}, which is not inside of {unit.label}: call "
            "fully_shard on inner modules first, and for a parameter that two modules share only on a module that holds "
            "both"
        )
    try:
        _ = parameter.shape
    except RuntimeError as error:  # of a module that learns its sizes from the first input
        raise ValueError(
            f"{where} has no shape yet: call the module once (a lazy layer learns its sizes from what comes in), or give it its sizes, "
            "before fully_shard"
        ) from error
    gradient = parameter.grad if isinstance(parameter, DTensor) else platform.get_grad(parameter)
    if gradient is not None:
        raise ValueError(
            f"{where} has a gradient of its whole shape: clear it (set to None) before fully_shard"
        )
    if isinstance(parameter, DTensor) and not leave_dtensors:
        _check_meshes(parameter, where, unit)


def _check_meshes(parameter: Any, where: str, unit: Unit) -> None:
    """That both meshes can be put together, so that what is sharded twice is a DTensor again."""
    own, other = unit.places.mesh, parameter.device_mesh
    how = (
        "cut both out of one mesh with named dims, such as init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')): "
        "its 'tp' for the parameter, its 'dp' for fully_shard"
    )
    if own.mesh_dim_names is None or other.mesh_dim_names is None:
        raise ValueError(f"{where} is a DTensor on {other}, and fully_shard got {own}: {how}")
    if set(own.mesh_dim_names) & set(other.mesh_dim_names) or own.root_mesh != other.root_mesh:
        raise ValueError(f"{where} is a DTensor on {other}, and fully_shard got {own}: {how}")
