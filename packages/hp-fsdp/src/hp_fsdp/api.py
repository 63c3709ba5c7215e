"""``fully_shard``: the public face."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hp_fsdp import arguments
from hp_fsdp.arrangement import can_share
from hp_fsdp.hooks import UnitHooks
from hp_fsdp.module import become_sharded
from hp_fsdp.options import Options
from hp_fsdp.ownership import Findings, find_parameters
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.places import Places, find_places, small_group
from hp_fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hp_fsdp.small_world import SmallWorld
from hp_fsdp.unit import Unit
from hp_platform.mesh import DeviceMesh
from hp_platform.platform import Platform, get_platform, require

M = TypeVar("M")


def fully_shard(
    module: M,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int = True,
    shard_placement_fn: Callable[[Any], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
    replicate_params: Iterable[Any] | None = None,
    comm_fusion: bool | None = None,
    comm_fusion_zero_copy: bool | None = None,
) -> M:
    """Make ``module`` (or several as one) a unit of fully sharded data parallel training, and return it.

    From now on every parameter of the module is a DTensor that is cut along one dim (chunks as torch.chunk cuts them; the last
    ones may be short or empty), in all places of a tied one. The whole parameters are there from just before forward until
    after it, and again in backward, which leaves the mean gradient over all ranks of the mesh in ``.grad`` of the pieces.
    Values and gradients are those of the unsharded program on the whole batch, if the loss is a mean and ranks have equally
    many samples.

    Call it on inner modules first (each transformer block), and on the whole model last: parameters of inner units are
    theirs. The outermost unit that runs is the root; it keeps its own whole parameters until the end of backward. Make
    optimizers after. The class of the module becomes a :class:`HSDPModule` as well.

    Args:
        module: has a ``forward``, or registered methods, and parameters equal on all ranks; or a list of such modules, which become one unit
            (whole from the first that is called until the last has ended). Parameters on the meta device stay there as
            pieces: ``model.to_empty(device=...)`` and initialise them before the first forward.
        mesh: 1-D: shard over it. 2-D: dim 0 replicates, dim 1 shards; sizes (n, 1) are plain data parallel training. None: 1-D
            over the world, on the first parameter's kind of device. A parameter that is a DTensor already, on other dims
            of the same mesh (tensor parallel), is sharded further, and is a DTensor of its own layout while it is whole. With
            mesh None DTensors stay as they are, with the gradients that operations on them give, which the unit adds up together
            (one all-reduce per mesh dim along which ranks use Replicate parameters differently); all parameters must be
            DTensors then, and what concerns their dtypes, places and cuts is refused.
        reshard_after_forward: free whole parameters between forward and backward (not those of the root). A number ``n`` that
            divides the ranks: keep ``1 / n`` of them, and gather among ``n`` neighbours for backward.
        shard_placement_fn: ``fn(parameter)`` gives ``Shard(dim)``, or None for dim 0. Other dims than the first cost one copy
            per gather and reduction.
        mp_policy: dtypes of computation and reduction; default: the parameters' own.
        offload_policy: where shards, their gradients and so the optimizer's state lie; default: on the mesh's device.
        ignored_params: parameters that stay as they are, on every rank, without any communication.
        replicate_params: parameters that are not cut; their gradients are all-reduced together, one collective per dtype more.
        comm_fusion: one collective per gather and per reduction of the unit. None: one for each dtype in use. True: exactly one;
            ValueError names the parameter that prevents it, and large layers of a root stay with it. False: one per parameter
            (of DTensors that stay, by their operations).
        comm_fusion_zero_copy: collectives read the pieces where they are, and GPUs of one machine copy from each other's memory
            instead. None: where the platform can. True: ValueError if it cannot read them there. False: the pieces have memory
            of their own, and are put together for every gather.

    Scalars (0-d) are replicated. Frozen parameters are gathered, and never reduced. A parameter that hangs in several
    modules is gathered once, and is owned by the outermost unit that holds all of them. One that no rank has used gets no
    gradient. What a module returns of its parameters (one of them, or a view) is a copy. Buffers are left alone.
    Branches inside of a unit may differ between ranks, and what it returns need not depend on
    its parameters everywhere; which units run, and in which order, may not. In this a layer of the root with whole parameters
    of 32 MiB and more counts as a unit (in torch): it is gathered when it is called, or when the root uses its parameters.

    Second derivatives need parameters that stay whole: ``set_reshard_after_backward(False)``.
    Arguments that take part in backward are not to be written in place by forward: torch refuses it.

    Communication: none here. A step: one all-gather per unit, one more before its backward if it was freed, and one
    reduce-scatter (2-D mesh: and one all-reduce of the piece), each per dtype in use; layers of the root that count as units as
    these, but the last of them gathered once. Gradients that are computed in a narrower dtype than they are reduced in travel as
    they are, in an all-to-all instead, and are widened where they are added up: the same sums from fewer bytes. Where up to 8
    ranks are GPUs of one machine that reach each other's memory, both are copies by the copy engines; they count as the
    collectives that they stand for. From the second step on, the next unit's all-gather runs beside the present unit's
    computation; reductions run beside backward from the first step.

    Memory: the pieces, at most two whole units besides the root's own, and the buffers of two reductions; for copies between
    GPUs up to 62 MiB for gathers and 62 MiB for reductions, for each dtype in use (``memory_plan(model).peers``).

    Errors: ValueError for a module that is none, is sharded already, or is a list or dict without a forward; for a mesh that does not fit; for a
    parameter that has a gradient, lies in another's memory, or is sharded by a unit outside of the module: the message names it. NotImplementedError
    where the framework cannot free memory below a tensor. In a forward that records, RuntimeError with the names of parameters that
    train and were added after this call (looked for at the first one, in torch also when modules were given more since). In backward, RuntimeError
    if parameters were written since forward (as far as the framework counts writes), or if it is recorded and frees whole parameters.

    Source: ZeRO stage 3 (Rajbhandari et al., 2020); the per-parameter form follows PyTorch's FSDP2.
    """
    platform = get_platform()
    modules = arguments.checked_modules(platform, module)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy must be a hp_fsdp.MixedPrecisionPolicy, got {type(policy).__name__}")
    offload = OffloadPolicy() if offload_policy is None else offload_policy
    if not isinstance(offload, OffloadPolicy):
        raise ValueError(f"offload_policy must be a hp_fsdp.OffloadPolicy, got {type(offload).__name__}")
    ignored = arguments.checked_parameters(platform, "ignored_params", ignored_params)
    replicated = arguments.checked_parameters(platform, "replicate_params", replicate_params)
    if ignored & replicated:
        raise ValueError("a parameter is in ignored_params and in replicate_params: give it in one of them")
    is_given = mesh is not None
    mesh = arguments.checked_mesh(platform, modules, mesh)
    places = find_places(mesh, platform.device(mesh.device_type).current())
    require(platform, "storage_resize", places.device, what="fully_shard")
    options = Options(
        policy.resolve(platform),
        reshard_after_forward=arguments.checked_reshard(reshard_after_forward, places.num_shards),
        comm_fusion=arguments.checked_flag("comm_fusion", comm_fusion),
        zero_copy=arguments.checked_flag("comm_fusion_zero_copy", comm_fusion_zero_copy),
        # On cpu everything is there already.
        offload=isinstance(offload, CPUOffloadPolicy) and not places.device.startswith("cpu"),
        pin_memory=getattr(offload, "pin_memory", True),
    )
    unit = Unit(platform, modules, places, options)
    found = find_parameters(platform, modules, unit, ignored, leave_dtensors=not is_given)
    asked = {
        "mp_policy.param_dtype": policy.param_dtype is not None,
        "mp_policy.reduce_dtype": policy.reduce_dtype is not None,
        "mp_policy.apply_grad_on_fp32_main_grad": policy.apply_grad_on_fp32_main_grad,
        "offload_policy": isinstance(offload, CPUOffloadPolicy),
        "shard_placement_fn": shard_placement_fn is not None,
        "replicate_params": bool(replicated),
    }
    arguments.check_reach(unit.label, [owners[0].name for _, owners in found.left], asked)
    new = [
        ManagedParameter(
            platform,
            parameter,
            owners,
            None
            if id(parameter) in replicated or not tuple(parameter.shape)
            else arguments.checked_dim(shard_placement_fn, parameter, owners[0].name),
        )
        for parameter, owners in found.new
    ]
    params = [*(param for _, param, _ in found.shared), *new]
    _check_memory(platform, new)
    _check_complex(platform, params, places)
    _check_extensions(params, options)
    _check_fusion(platform, params, places, options)
    # All checks are behind us: from here on parameters change.
    unit.ignored = tuple(found.ignored)
    unit.leaves_dtensors = bool(found.left) or any(keeper.leaves_dtensors for keeper, _, _ in found.shared)
    _take_over(unit, found, new)
    if not isinstance(options.reshard_after_forward, bool):
        unit.small_world = SmallWorld(platform, small_group(places, options.reshard_after_forward))
    hooks = UnitHooks(unit)
    unit.hooks = hooks
    for each in modules:
        become_sharded(each, unit)
    hooks.install()
    return module


def _take_over(unit: Unit, found: Findings, new: list[ManagedParameter]) -> None:
    for keeper, param, owners in found.shared:
        keeper.release(param)
        param.owners = owners
        param.show_shard()
    left = [ManagedParameter(unit.platform, each, owners, None, stays=True) for each, owners in found.left]
    unit.add([*(param for _, param, _ in found.shared), *left], whole=False)
    unit.add(new, whole=True)


def _check_memory(platform: Platform, new: list[ManagedParameter]) -> None:
    """That those that are cut are not several parameters over one memory, whose pieces would go different ways."""
    seen: dict[int, ManagedParameter] = {}
    for param in new:
        if param.dim is None or param.is_extended or not param.own_numel:
            continue
        address = platform.data_ptr(param.origin.local(param.parameter))
        other = seen.setdefault(address, param)
        if address and other is not param and (param.trains or other.trains):  # 0: on the meta device
            raise ValueError(
                f"parameters {other.name!r} and {param.name!r} are two that lie in the same memory, and each would get pieces of its own: let "
                "them be one parameter that hangs in both places (a.weight = b.weight), or give one of them memory of its own"
            )


def _check_complex(platform: Platform, params: list[ManagedParameter], places: Places) -> None:
    """That gradients of complex parameters can be reduced."""
    for param in params:
        name, kind = platform.dtype_name(param.dtype), places.device.partition(":")[0]
        if name.startswith("complex") and param.trains and not platform.can_reduce(param.dtype, kind):
            raise NotImplementedError(
                f"parameter {param.name!r} is {name}, and {platform.platform_type.value} on {kind} reduces no complex gradients: keep its "
                "real and its imaginary part as two parameters, freeze it, or give it in ignored_params"
            )


def _check_extensions(params: list[ManagedParameter], options: Options) -> None:
    """That what says itself what is gathered of it can do so."""
    for param in params:
        if not param.is_extended:
            continue
        if param.dim != 0 or param.origin.mesh is not None:
            how = "is replicated" if param.dim is None else f"is sharded along dim {param.dim}"
            raise ValueError(
                f"parameter {param.name!r} has an extension and {how if param.origin.mesh is None else 'is a DTensor'}: what an "
                "extension gives is gathered along dim 0 of plain parameters; shard it so, or without extension"
            )
        if options.comm_fusion:
            raise ValueError(
                f"comm_fusion=True is not possible with parameter {param.name!r}, which has an extension and travels by itself; "
                "leave comm_fusion None"
            )


def _check_fusion(
    platform: Platform, params: list[ManagedParameter], places: Places, options: Options
) -> None:
    """What comm_fusion=True and comm_fusion_zero_copy=True insist on."""
    sharded = [param for param in params if param.dim is not None]
    if options.comm_fusion and sharded:
        first = sharded[0]
        for param in sharded[1:]:
            for what, dtype_of in (
                ("is computed with", options.precision.compute_dtype),
                ("is reduced in", options.precision.reduction_dtype),
            ):
                if dtype_of(param.dtype) != dtype_of(first.dtype):
                    raise ValueError(
                        f"comm_fusion=True needs one dtype for all parameters of a unit: {param.name!r} {what} "
                        f"{platform.dtype_name(dtype_of(param.dtype))}, {first.name!r} in "
                        f"{platform.dtype_name(dtype_of(first.dtype))}; set dtypes in mp_policy, or leave comm_fusion None"
                    )
    if options.zero_copy:
        reason = None
        if options.offload:
            reason = "with an offload policy pieces travel to the device first"
        elif not can_share(platform, places.device):
            reason = (
                f"{platform.platform_type.value} on {places.device} cannot make tensors of parts of others"
            )
        if reason:
            raise ValueError(f"comm_fusion_zero_copy=True is not possible here: {reason}; leave it None")
