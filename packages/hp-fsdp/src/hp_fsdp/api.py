"""``fully_shard``: the public face."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hp_fsdp.hooks import UnitHooks
from hp_fsdp.module import become_sharded
from hp_fsdp.parameter import OWNER_MARK, SUCCESSOR, ManagedParameter, Owner
from hp_fsdp.places import find_places
from hp_fsdp.policy import MixedPrecisionPolicy
from hp_fsdp.unit import Unit, unit_of, units_in
from hp_platform import process_groups
from hp_platform.mesh import DeviceMesh, init_device_mesh
from hp_platform.platform import Platform, get_platform, require

M = TypeVar("M")


def fully_shard(
    module: M,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
) -> M:
    """Make ``module`` one unit of fully sharded data parallel training, and return it.

    From now on every parameter of the module is a DTensor that is cut along dim 0 (chunks as torch.chunk cuts them; the last
    ones may be short or empty), in all places of a tied one. The whole parameters are there from just before forward until
    after it, and again in backward, which leaves the mean gradient over all ranks of the mesh in ``.grad`` of the pieces.
    Values and gradients are those of the unsharded program on the whole batch, if the loss is a mean and ranks have equally
    many samples.

    Call it on inner modules first (each transformer block), and on the whole model last: parameters of inner units are
    theirs. The outermost unit that runs is the root; it keeps its own whole parameters until the end of backward. Make
    optimizers after. The class of the module becomes a :class:`HSDPModule` as well.

    Args:
        module: has a ``forward``, and parameters that are equal on all ranks and not on the meta device.
        mesh: 1-D: shard over it. 2-D: dim 0 replicates, dim 1 shards. None: 1-D over the world, on the first parameter's
            kind of device.
        reshard_after_forward: free whole parameters between forward and backward (not those of the root).
        mp_policy: dtypes of computation and reduction; default: the parameters' own.
        ignored_params: parameters that stay as they are, on every rank, without any communication.

    Scalars (0-d) are replicated. Frozen parameters are gathered, and never reduced. A parameter that hangs in several
    modules is gathered once, and is owned by the outermost unit that holds all of them. One that no rank has used gets no
    gradient. Buffers are left alone. Branches inside of a unit may differ between ranks; which units run, and in which
    order, may not.

    Communication: none here. A step: one all-gather per unit, one more before its backward if it was freed, and one
    reduce-scatter (2-D mesh: and one all-reduce of the piece), each per dtype in use.

    Errors: ValueError for a module that is none, is sharded already, or has no forward; for a mesh that does not fit; for a
    parameter on the meta device, one that is sharded by other means, has a gradient, or is sharded by a unit outside of
    the module: the message names it. NotImplementedError where the framework cannot free memory below a tensor.

    Source: ZeRO stage 3 (Rajbhandari et al., 2020); the per-parameter form follows PyTorch's FSDP2.
    """
    platform = get_platform()
    _check_module(platform, module)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy must be a hp_fsdp.MixedPrecisionPolicy, got {type(policy).__name__}")
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward must be True or False, got {reshard_after_forward!r}")
    ignored = _ignored(platform, ignored_params)
    mesh = _mesh(platform, module, mesh)
    device = platform.device(mesh.device_type).current()
    require(platform, "storage_resize", device, what="fully_shard")

    unit = Unit(
        platform,
        module,
        find_places(mesh, device),
        policy.resolve(platform),
        reshard_after_forward=reshard_after_forward,
    )
    inner = list(units_in(platform, module))
    for each in inner:
        each.reshard()
    keepers = {param: each for each in inner for param in each.params}
    successors = {id(param.parameter): param for param in keepers}
    new, shared = [], []
    for parameter, owners in _places_of_parameters(platform, module, successors).values():
        if id(parameter) in ignored:
            continue
        param = successors.get(id(parameter))
        if param is None:
            _check_parameter(platform, parameter, owners[0], unit)
            new.append(ManagedParameter(platform, parameter, owners))
            continue
        keeper = keepers[param]
        if len(param.owners) < len(owners):  # tied to a module outside of the unit that shards it
            if keeper.places.mesh != mesh:
                raise ValueError(
                    f"parameter {owners[-1].name!r} of {unit.label} is also {param.name!r} of {keeper.label}, which is sharded "
                    f"over another mesh, {keeper.places.mesh}: use one mesh for modules that share parameters"
                )
            shared.append((keeper, param, owners))
    # All checks are behind us: from here on parameters change.
    for keeper, param, owners in shared:
        keeper.release(param)
        param.owners = owners
        param.show_shard()
    unit.add([param for _, param, _ in shared], whole=False)
    unit.add(new, whole=True)
    become_sharded(module, unit)
    UnitHooks(unit).install()
    return module


def _check_module(platform: Platform, module: Any) -> None:
    if not isinstance(module, platform.Module):
        raise ValueError(
            f"fully_shard takes a module of {platform.platform_type.value}, got {type(module).__name__}"
        )
    if unit_of(module) is not None:
        raise ValueError(f"{type(module).__name__} is sharded already: call fully_shard once per module")
    if isinstance(module, platform.ModuleList):
        raise ValueError(
            "a ModuleList has no forward, so nothing would gather its parameters: call fully_shard on each of its modules"
        )


def _ignored(platform: Platform, given: Iterable[Any] | None) -> set[int]:
    found = list(given) if given is not None else []
    for index, parameter in enumerate(found):
        if not platform.is_parameter(parameter):
            raise ValueError(f"ignored_params[{index}] must be a parameter, got {type(parameter).__name__}")
    return {id(parameter) for parameter in found}


def _mesh(platform: Platform, module: Any, mesh: Any) -> DeviceMesh:
    if mesh is None:
        first = next((p for _, p in platform.named_parameters(module)), None)
        found = None if first is None else platform.device_of(first).partition(":")[0]
        kind = None if found == "meta" else found
        return init_device_mesh(kind, (process_groups.ensure_initialized(kind).size,))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh must be a hp_platform.DeviceMesh or None, got {type(mesh).__name__}: make one with "
            "init_device_mesh(device_type, (num_ranks,))"
        )
    return mesh


def _places_of_parameters(
    platform: Platform, module: Any, successors: Mapping[int, ManagedParameter]
) -> dict[int, tuple[Any, tuple[Owner, ...]]]:
    """Every parameter with all places where it hangs, in the order of registration.

    A whole one whose successor, sharded by a unit inside of the module, hangs elsewhere (a tie) counts as that.
    """
    found: dict[int, tuple[Any, tuple[Owner, ...]]] = {}
    for path, each in platform.named_modules(module):
        for attribute, parameter in platform.named_parameters(each, recurse=False, remove_duplicate=False):
            owner = Owner(each, attribute, f"{path}.{attribute}" if path else attribute)
            successor = getattr(parameter, SUCCESSOR, None)
            if successor is not None and id(successor.parameter) in successors:
                parameter = successor.parameter
            _, owners = found.get(id(parameter), (parameter, ()))
            found[id(parameter)] = (parameter, (*owners, owner))
    return found


def _check_parameter(platform: Platform, parameter: Any, owner: Owner, unit: Unit) -> None:
    where = f"parameter {owner.name!r} of {unit.label}"
    whole = getattr(parameter, SUCCESSOR, None)
    sharded_by = getattr(parameter if whole is None else whole.parameter, OWNER_MARK, None)
    if sharded_by is not None:
        raise ValueError(
            f"{where} is sharded by another unit already, {sharded_by}, which is not inside of {unit.label}: call "
            "fully_shard on inner modules first, and for a parameter that two modules share only on a module that holds "
            "both"
        )
    if platform.device_of(parameter).startswith("meta"):
        raise ValueError(
            f"{where} is on the meta device and has no values: materialise and initialise the module before fully_shard"
        )
    if hasattr(parameter, "placements"):
        raise ValueError(f"{where} is a sharded tensor already: this version takes plain parameters only")
    if platform.get_grad(parameter) is not None:
        raise ValueError(
            f"{where} has a gradient of its whole shape: clear it (set to None) before fully_shard"
        )
