"""How DTensors begin: around a local tensor, or cut from a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size, chunk_sizes
from hp_dtensor.cuts import stacks_of
from hp_dtensor.layout import Layout, mesh_and_placements
from hp_dtensor.placements import REPLICATE, Partial, Placement, RaggedShard, Shard
from hp_dtensor.ragged import ragged_dim
from hp_dtensor.spec import Spec, make_spec, resolve, shown
from hp_dtensor.strides import whole_strides
from hp_platform import collectives, get_platform

if TYPE_CHECKING:
    from hp_platform import DeviceMesh

Tensor = Any


# -------------------------------------------------------------------------------------------------------- from a local one
def checked_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
) -> tuple[Tensor, Spec]:
    """The arguments of ``from_local`` as local tensor and spec, or the error that says what is wrong with them."""
    _check_plain(local, "from_local")
    check_mesh(mesh)
    placements = resolve(mesh, placements, local.ndim if shape is None else len(shape))
    if stride is not None:
        _check_stride(local, shape, stride)
    if shape is None:
        shape = _agreed_shape(local, mesh, placements)
    spec = make_spec(mesh, placements, shape)
    if run_check:
        _compare_over_ranks(local, spec)
    if tuple(local.shape) != spec.local_shape:
        raise ValueError(
            f"the local tensor has shape {tuple(local.shape)}, but the piece of {spec} at coordinate "
            f"{spec.mesh.get_coordinate()} has shape {spec.local_shape}: give the global shape, and the piece of the chunk "
            f"rule (ceil-sized chunks, the last ones short or empty)"
        )
    return _from_first_ranks(local, spec) if run_check else local, spec


def _agreed_shape(local: Tensor, mesh: Any, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The global shape of what the ranks hold, from their sizes; inner cuts are added up first."""
    platform = get_platform()
    shape = tuple(local.shape)
    if ragged_dim(placements) is not None:
        raise ValueError(
            f"from_local with {shown(placements)}: the runs of a RaggedShard do not say the global shape; give shape="
        )
    stacks = stacks_of(placements, mesh.shape, len(shape))
    for mesh_dim in (i for stack in stacks for i in reversed(stack)):
        placement, num_ranks = placements[mesh_dim], mesh.shape[mesh_dim]
        if not isinstance(placement, Shard) or num_ranks == 1:
            continue
        mine = platform.tensor([list(shape)], dtype="int64", device=platform.device_of(local))
        gathered = platform.to_numpy(collectives.all_gather(mine, mesh.get_group(mesh_dim))).tolist()
        shapes = [tuple(gathered[position]) for position in mesh.group_positions(mesh_dim)]
        sizes = tuple(s[placement.dim] for s in shapes)
        rest = {s[: placement.dim] + s[placement.dim + 1 :] for s in shapes}
        total = sum(sizes)
        if len(rest) > 1 or sizes != chunk_sizes(total, num_ranks):
            raise ValueError(
                f"from_local with {placement} along mesh dim {mesh_dim}: the ranks hold shapes {shapes}, which are not the "
                f"chunks of one tensor (sizes {chunk_sizes(total, num_ranks)} along dim {placement.dim}, equal otherwise)"
            )
        shape = (*shape[: placement.dim], total, *shape[placement.dim + 1 :])
    return shape


def _compare_over_ranks(local: Tensor, spec: Spec) -> None:
    platform = get_platform()
    mine = (
        platform.dtype_name(local.dtype),
        spec.shape,
        shown(spec.placements),
        tuple(local.shape) == spec.local_shape,
    )
    for mesh_dim, num_ranks in enumerate(spec.mesh.shape):
        if num_ranks == 1:
            continue
        of_ranks = collectives.all_gather_object(mine, spec.mesh.get_group(mesh_dim))
        if any(theirs[:3] != mine[:3] for theirs in of_ranks):
            told = "; ".join(f"dtype {d}, global shape {s}, placements {p}" for d, s, p, _ in of_ranks)
            raise ValueError(f"from_local: the ranks along mesh dim {mesh_dim} disagree: {told}")
        if not all(theirs[3] for theirs in of_ranks) and mine[3]:
            raise ValueError(
                f"from_local: another rank along mesh dim {mesh_dim} gave a local tensor that is not its piece of {spec}"
            )


def _from_first_ranks(local: Tensor, spec: Spec) -> Tensor:
    """Where the tensor is Replicate, the values of the first rank; the gradient still goes to every rank's own tensor."""
    platform = get_platform()
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_replicate() and spec.mesh.shape[mesh_dim] > 1:
            group = spec.mesh.get_group(mesh_dim)
            first = group.ranks[spec.mesh.group_positions(mesh_dim)[0]]
            with platform.no_grad():
                # Also in the local tensor itself: from_local keeps it.
                platform.copy_(platform.detach(local), collectives.broadcast(local, first, group))
    return local


# ----------------------------------------------------------------------------------------------------- from a whole one
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | Layout | None = None,
    placements: Sequence[Any] | Layout | None = None,
    *,
    src_data_rank: int | None = None,
) -> Any:
    """Cut a whole tensor into a DTensor that owns its memory. All ranks of the mesh call.

    Args:
        tensor: plain, of the global shape on every rank; also on the meta device. Its ``requires_grad`` goes on to the
            result, which is a leaf.
        device_mesh: default: the current mesh (``with mesh:``). A :class:`hp_dtensor.Layout` says mesh and placements.
        placements: one per mesh dim, or aliases (one per tensor dim), or a Layout; default: Replicate everywhere.
            A Partial keeps the value: the first rank along the mesh dim holds it and the others zeros (sum) or ones (prod),
            or every rank does (avg, max, min, all, any).
        src_data_rank: None (default): every rank cuts its own tensor, which must be equal everywhere; no communication. A
            number: the position along each mesh dim of the rank whose values count.

    Communication: with ``src_data_rank`` one scatter or broadcast of the tensor (or what outer mesh dims left of it) per mesh
    dim; none on the meta device. ValueError for arguments that do not fit.
    """
    from hp_dtensor.dtensor import DTensorMethods
    from hp_dtensor.native import DTensor
    from hp_platform import get_current_mesh

    platform = get_platform()
    if isinstance(tensor, DTensorMethods):
        raise ValueError("distribute_tensor takes a plain tensor, got a DTensor: use its redistribute()")
    _check_plain(tensor, "distribute_tensor")
    given, placements = mesh_and_placements(device_mesh, placements)
    mesh: Any = get_current_mesh() if given is None else given
    check_mesh(mesh)
    spec = make_spec(
        mesh, (REPLICATE,) * len(mesh.shape) if placements is None else placements, tuple(tensor.shape)
    )
    _check_source(src_data_rank, spec)
    local = platform.detach(tensor)
    has_values = platform.device_of(local) != "meta"
    source = src_data_rank if has_values else None
    # What cuts nothing first; then outer cuts before inner ones.
    cutting = [i for stack in spec.cuts for i in stack]
    for mesh_dim in (*(i for i in range(len(mesh.shape)) if i not in cutting), *cutting):
        placement = spec.placements[mesh_dim]
        if mesh.shape[mesh_dim] > 1:
            local = _dealt(local, spec, mesh_dim, placement, source)
        if isinstance(placement, RaggedShard):
            start, length = spec.local_offset[0], spec.local_shape[0]
            local = platform.narrow(platform.reshape(local, (-1,)), 0, start, length)
    local = platform.clone(local)
    result = DTensor._wrap(local, spec)
    return result.requires_grad_(True) if platform.requires_grad(tensor) else result


def _dealt(local: Tensor, spec: Spec, mesh_dim: int, placement: Placement, source: int | None) -> Tensor:
    """One mesh dim's part of the way from the whole to this rank's piece."""
    platform, mesh = get_platform(), spec.mesh
    index, num_ranks = mesh.get_coordinate()[mesh_dim], mesh.shape[mesh_dim]
    if isinstance(placement, Shard):
        dim, n = placement.dim, local.shape[placement.dim]
        if source is not None:
            return _scattered(local, spec, mesh_dim, dim, source)
        return platform.narrow(local, dim, chunk_offset(n, num_ranks, index), chunk_size(n, num_ranks, index))
    if source is not None:
        group = mesh.get_group(mesh_dim)
        local = collectives.broadcast(local, group.ranks[mesh.group_positions(mesh_dim)[source]], group)
    if index == 0 or not isinstance(placement, Partial) or placement.reduce_op not in ("sum", "prod"):
        return local
    return platform.full(
        tuple(local.shape), int(placement.is_partial("prod")), local.dtype, platform.device_of(local)
    )


def _scattered(whole: Tensor, spec: Spec, mesh_dim: int, dim: int, source: int) -> Tensor:
    """The chunk of the source's values; chunks travel padded to one size, as scatter wants it."""
    platform, mesh = get_platform(), spec.mesh
    group, positions = mesh.get_group(mesh_dim), mesh.group_positions(mesh_dim)
    index, num_ranks, n = mesh.get_coordinate()[mesh_dim], mesh.shape[mesh_dim], whole.shape[dim]
    length = chunk_length(n, num_ranks)

    def padded(size: int) -> tuple[int, ...]:
        return (*whole.shape[:dim], size, *whole.shape[dim + 1 :])

    device = platform.device_of(whole)
    like = platform.empty(padded(length), whole.dtype, device)
    blocks = None
    if index == source:
        missing = platform.zeros(padded(length * num_ranks - n), whole.dtype, device)
        even = platform.split(platform.cat([whole, missing], dim), [length] * num_ranks, dim)
        order = sorted(range(num_ranks), key=positions.__getitem__)
        blocks = [platform.contiguous(even[coordinate]) for coordinate in order]
    mine = collectives.scatter(blocks, like, group.ranks[positions[source]], group)
    return platform.narrow(mine, dim, 0, chunk_size(n, num_ranks, index))


# ------------------------------------------------------------------------------------------------------------------ checks
def _check_plain(tensor: Any, function: str) -> None:
    from hp_dtensor.dtensor import DTensorMethods

    if isinstance(tensor, DTensorMethods):
        raise ValueError(
            f"{function} takes a plain tensor, got a DTensor; use it as it is, or its to_local()"
        )
    if not get_platform().is_tensor(tensor):
        raise ValueError(
            f"{function} takes a tensor of {get_platform().platform_type.value}, got {type(tensor).__name__}"
        )


def check_mesh(mesh: Any) -> None:
    """ValueError unless it is a mesh of this library."""
    from hp_platform import DeviceMesh

    if isinstance(mesh, (list, tuple)) and any(isinstance(x, Placement) for x in mesh):
        raise ValueError(
            f"device_mesh must be a hp_platform.DeviceMesh, got {mesh!r}: give it by name, placements={mesh!r}"
        )
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh must be a hp_platform.DeviceMesh, got {type(mesh).__name__}; make one with init_device_mesh"
        )


def _check_stride(local: Tensor, shape: Sequence[int] | None, stride: Sequence[int]) -> None:
    if shape is None:
        raise ValueError(f"from_local got stride {tuple(stride)} without shape: give the global shape, too")
    found = whole_strides(local.stride(), shape)
    if len(stride) != len(found) or any(
        a != b and n > 1 for a, b, n in zip(stride, found, shape, strict=True)
    ):
        raise ValueError(
            f"from_local got stride {tuple(stride)}, but the local tensor with strides {tuple(local.stride())} is a piece of "
            f"a whole of shape {tuple(shape)} with strides {found}: leave stride out, or lay the local tensor out so"
        )


def _check_source(source: int | None, spec: Spec) -> None:
    smallest = min(spec.mesh.shape)
    if source is None:
        return
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < smallest:
        raise ValueError(
            f"src_data_rank is a position along every mesh dim of {spec.mesh}, 0 to {smallest - 1}, or None; got {source!r}"
        )
