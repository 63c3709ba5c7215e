"""``get_grad_norm`` and ``clip_grad_norm_``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

from hp_optim.clip.gradients import Gradients, Lists, gradients_of, refuse_sparse
from hp_optim.clip.orders import Order, order_of
from hp_optim.clip.shares import ALONE, Shares
from hp_platform import collectives
from hp_platform.mesh import DeviceMesh
from hp_platform.platform import Platform, get_platform
from hp_platform.process_groups import ensure_initialized, is_initialized, world_device
from hp_platform.process_groups import resolve as resolve_group
from hp_platform.subgroups import group_of

if TYPE_CHECKING:
    from hp_platform.group import ProcessGroup
    from hp_platform.protocols.tensor import Tensor


def get_grad_norm(
    parameters: Any | Iterable[Any],
    norm_type: float | str = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """The norm of the gradients of all parameters, taken as one vector of the unsharded program. All ranks call; all get the same.

    Args:
        parameters: a module, an iterable of tensors, or one tensor: plain ones and DTensors, on any mix of meshes. A plain
            tensor is the same on all ranks (as under data parallelism), or this pipeline stage's own.
        norm_type: the p of the p-norm. ``inf`` and ``-inf`` (also as strings): the largest and the smallest magnitude. 0: how
            many elements are not 0 (torch's function counts tensors instead).
        error_if_nonfinite: raise RuntimeError if the norm is infinite or NaN. The only thing here for which the host waits for
            the device.
        foreach: for torch's signature; lists of tensors are always measured at once.
        pp_group: the ranks that have the other stages of a pipeline, as a group or a 1-D mesh (``mesh["pp"]``): their norms
            are combined, too. A stage without parameters gives an empty list. A tied parameter that two stages have is given by
            one of them only, or counts twice.

    Returns:
        a 0-d tensor on the device of the first parameter: float64 if one of the gradients (or a parameter without one) is,
        else float32, in which the norms of narrower ones are computed. Without any elements 0, and ``inf`` for ``-inf``.

    What counts: ``parameter.main_grad`` if it has one, else ``parameter.grad``; by the gradient's own layout if it is a DTensor,
    else by the parameter's. What is the same on several ranks counts once, Partial gradients are reduced first, a parameter
    given twice counts once, one without a gradient not at all. All ranks of a mesh give the same parameters on it; a
    parameter may lack its gradient on some ranks only where it would lie as the parameter does.

    Communication: one all-reduce of 8 bytes (4 where the device has no float64) per mesh along which something is cut, over all
    of these dims at once, and one over ``pp_group``; meshes with the same ranks share theirs. One reduce-scatter (or all-reduce)
    per Partial gradient. Where gradients lie on the host and the mesh on devices, the host waits for the result.

    ValueError for arguments that do not fit: see the messages. Source: the definition of ``torch.nn.utils.get_total_norm``.
    """
    return _measured("get_grad_norm", parameters, norm_type, error_if_nonfinite, foreach, pp_group)[0]


def clip_grad_norm_(
    parameters: Any | Iterable[Any],
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Scale the gradients in place by ``min(1, max_norm / (norm + 1e-6))``; returns the norm before. All ranks call.

    ``max_norm``: 0 or more, a number or a tensor of one element, which is read on the device: the host does not wait for it, and nobody
    checks its value. ``inf`` scales nothing where the norm is finite; an infinite norm makes NaN of the gradients then, as in torch.

    All else is as for :func:`get_grad_norm`: what counts, which communication, which errors. Gradients stay as they lie: each rank
    scales what it has, a Partial one stays Partial (ValueError for a product, of which every factor would be scaled). One
    multiplication per list of equal dtype and device; the factor stays on the device and is not rounded to the dtype of the
    gradients.

    Same as ``torch.nn.utils.clip_grad_norm_`` of the full gradients.
    """
    platform = get_platform()
    limit = _checked_limit(platform, max_norm)
    total, lists = _measured(
        "clip_grad_norm_", parameters, norm_type, error_if_nonfinite, foreach, pp_group, to_scale=True
    )
    with platform.no_grad():
        device = platform.device_of(total)
        if isinstance(limit, float):
            most = platform.full((), limit, total.dtype, device)
        else:
            most = platform.cast(platform.to_device(limit, device), total.dtype)
        factor = most / (total + platform.full((), 1e-6, total.dtype, device))
        one = platform.full((), 1.0, total.dtype, device)
        # This way round NaN stays NaN, and spoils the gradients as it does in torch.
        factor = platform.where(factor > one, one, factor)
        for (_, place), gradients in lists.items():
            platform.foreach_mul_([g.local for g in gradients], platform.to_device(factor, place))
    return total


def _measured(
    function: str,
    parameters: Any,
    norm_type: Any,
    error_if_nonfinite: bool,
    foreach: Any,
    pp_group: Any,
    *,
    to_scale: bool = False,
) -> tuple[Tensor, Lists]:
    """The norm, and what there is to scale."""
    platform, order = get_platform(), order_of(norm_type)
    if foreach is not None and not isinstance(foreach, bool):
        raise ValueError(f"foreach is {foreach!r}; give None, True or False, or leave it out")
    group = _checked_group(pp_group)
    with platform.no_grad():
        found = gradients_of(platform, function, parameters)
        if to_scale:
            _refuse_products(found.lists)
        try:
            total = _total(platform, found, order, group)
        except RuntimeError:
            refuse_sparse(function, found.lists)
            raise
    if error_if_nonfinite:
        value = float(platform.to_numpy(total))
        if not math.isfinite(value):
            raise RuntimeError(
                f"{function}: the norm of order {order.p:g} of the gradients is {value}, so they cannot be scaled to a finite one: skip this "
                "step, or go on with error_if_nonfinite=False"
            )
    return total, found.lists


def _total(platform: Platform, found: Gradients, order: Order, pp_group: ProcessGroup | None) -> Tensor:
    shares = Shares(found.specs)
    groups = shares.groups()
    home = _home(platform, found)
    meeting = None if pp_group is None else world_device()
    wide = _wide(platform, {home, meeting or home, *(mesh.device_type for mesh in groups.values())})
    values = _values(platform, found.lists, shares, order, home, wide)

    def neutral(place: str) -> Tensor:
        return platform.full((1,), order.neutral, wide, place)

    works = {}
    for ranks in sorted(groups):
        kind = groups[ranks].device_type
        ensure_initialized(kind)
        value, place = values.get(ranks), platform.device(kind).current()
        value = neutral(place) if value is None else platform.to_device(value, place)
        works[ranks] = collectives.all_reduce(value, group_of(ranks), order.op, async_op=True)
    parts = [platform.to_device(works[ranks].wait(), home) for ranks in groups]
    parts = parts + [values[ALONE]] if ALONE in values else parts
    value = platform.cat(parts) if len(parts) > 1 else parts[0] if parts else neutral(home)
    if len(parts) > 1:
        value = order.combined(platform, value)
    if meeting is not None:
        value = collectives.all_reduce(platform.to_device(value, meeting), pp_group, order.op)
        value = platform.to_device(value, home)
    norm = platform.reshape(order.norm(platform, value), ())
    return platform.cast(norm, "float64" if found.is_double else "float32")


def _values(
    platform: Platform, lists: Lists, shares: Shares, order: Order, home: str, wide: Any
) -> dict[tuple[int, ...], Tensor]:
    """For each group, the value of this rank's share in it, of shape ``(1,)``; what needs no group under :data:`ALONE`."""
    parts: dict[tuple[int, ...], list[Tensor]] = {}
    for (dtype, _), members in lists.items():
        mine: dict[tuple[int, ...], list[Tensor]] = {}
        for gradient in members:
            ranks = shares.of(gradient.spec)
            if ranks is not None:
                mine.setdefault(ranks, []).append(gradient.part)
        if not mine:
            continue
        # Counts above 2^24 are not exact in float32, so order 0 counts in the wide dtype.
        exact = wide if order.p == 0 or dtype == platform.dtype("float64") else platform.dtype("float32")
        norms = platform.foreach_norm([x for xs in mine.values() for x in xs], order.p, exact)
        values = order.values(platform, platform.cast(platform.to_device(norms, home), wide))
        for ranks, own in zip(mine, platform.split(values, [len(xs) for xs in mine.values()]), strict=True):
            parts.setdefault(ranks, []).append(own)
    return {
        ranks: order.combined(platform, own[0] if len(own) == 1 else platform.cat(own))
        for ranks, own in parts.items()
    }


def _home(platform: Platform, found: Gradients) -> str:
    """The device on which the result is given."""
    place = "meta" if found.like is None else platform.device_of(found.like)
    if place != "meta":
        return place
    return world_device() if is_initialized() else platform.device().current()


def _wide(platform: Platform, devices: set[str]) -> Any:
    """In which dtype values combine. Squares of norms above 2e19 are beyond float32, so float64 where every device has it."""
    has = all(
        platform.supports(capability, device)
        for device in devices
        for capability in ("float64_compute", "reduce_float64")
    )
    return platform.dtype("float64" if has else "float32")


def _checked_limit(platform: Platform, max_norm: Any) -> float | Tensor:
    """A number, or a 0-d tensor whose value nobody has looked at."""
    if platform.is_tensor(max_norm) and not hasattr(max_norm, "to_local"):
        if math.prod(max_norm.shape) != 1:
            raise ValueError(
                f"max_norm is a tensor of shape {tuple(max_norm.shape)}; as a tensor it has one element: one limit for all gradients together"
            )
        return platform.reshape(platform.detach(max_norm), ())
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not float(max_norm) >= 0:
        raise ValueError(
            f"max_norm is {max_norm!r}; it is a number, 0 or more, or a plain tensor of one element: the norm that the gradients have at "
            "most afterwards"
        )
    return float(max_norm)


def _checked_group(given: Any) -> ProcessGroup | None:
    if given is None:
        return None
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"pp_group is a mesh of {given.ndim} dims, {given}; give its dim of the pipeline, such as mesh['pp']"
            )
        return given.get_group()
    return resolve_group(given)


def _refuse_products(lists: Lists) -> None:
    products = [gradient for members in lists.values() for gradient in members if gradient.is_product]
    if products:
        raise ValueError(
            f"clip_grad_norm_: a gradient of shape {tuple(products[0].local.shape)} is Partial('prod'), so every factor would be scaled: "
            "redistribute it to Replicate or Shard first"
        )
