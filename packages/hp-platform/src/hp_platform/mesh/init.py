"""init_device_mesh: the mesh of a shape, the same object for the same request."""

from __future__ import annotations

from collections.abc import Sequence

from hp_platform import _process
from hp_platform.mesh import arithmetic, checks, place
from hp_platform.mesh.device_mesh import DeviceMesh
from hp_platform.mesh.root import cache_key, new_state


def init_device_mesh(
    device_type: str | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    mesh_dim_names: tuple[str, ...] | None = None,
    *,
    rank_list: Sequence[int] | None = None,
    init_backend: bool = True,
    _rank: int | None = None,
) -> DeviceMesh:
    """A mesh of shape ``mesh_shape``, filled with ranks in row-major order.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"npu"``, ``"gpu"`` for ``"cuda"``; None: the best device of this machine.
        mesh_shape: number of coordinates along each dim, positive.
        mesh_dim_names: one name per dim, such as ``("dp", "tp")``. A last dim ``"interleaved_parallel"`` is virtual: it
            splits the work inside each device and takes no ranks.
        rank_list: the global ranks, as many as the shape holds; None: the contiguous block that holds this rank, where
            blocks tile the world from rank 0. A mesh may so be smaller than the world, each block has its own.
        init_backend: whether asking the mesh for a group makes the default process group if there is none.
        _rank: the rank to see the mesh from, for dry runs and tests; default: the world's, else the launcher's.

    While a default process group exists the same request gives the same object. No communication, and no process group is
    made before it is asked for: see :meth:`DeviceMesh.get_group`.

    TypeError: ``mesh_shape`` no tuple of int, names no tuple of str, ``rank_list`` no sequence of int. ValueError: an
    unknown device type, an empty shape, a size below 1, another number of names than dims, a name empty or given twice,
    ``interleaved_parallel`` not last, a rank given twice, another number of ranks than the shape holds, or ranks that the
    world does not have. RuntimeError: nothing says which rank this process is.
    """
    shape = checks.sizes(mesh_shape, "mesh_shape")
    names = checks.names(mesh_dim_names, len(shape))
    device = checks.device_type(_best_device() if device_type is None else device_type)
    rank, world_size = place.find_place() if _rank is None else (checks.integer(_rank, "_rank"), None)
    num_ranks = checks.num_ranks(shape, names)
    if rank_list is not None:
        ranks = checks.rank_line(rank_list, "rank_list")
        if len(ranks) != num_ranks:
            raise ValueError(
                f"rank_list has {len(ranks)} ranks, but mesh_shape {shape} holds {num_ranks}; give as many"
            )
        checks.ranks_of_world(ranks, world_size, "rank_list")
        rank = place.rank_for(ranks, rank)
    else:
        rank = place.rank_for(tuple(range(num_ranks)), rank)
        ranks = arithmetic.block_holding(rank, num_ranks)
        if world_size is not None and num_ranks > world_size:
            raise ValueError(
                f"mesh_shape {shape} holds {num_ranks} ranks, but the world has {world_size}; choose sizes that multiply to "
                f"at most that"
            )
        if world_size is not None and ranks[-1] >= world_size:
            raise ValueError(
                f"mesh_shape {shape} holds {num_ranks} ranks, which do not tile the world of {world_size}: the block of rank "
                f"{rank} would be {place.shown(ranks)}; give rank_list"
            )
    return root_mesh(device, shape, ranks, names, rank=rank, init_backend=init_backend)


def root_mesh(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    names: tuple[str, ...] | None,
    *,
    rank: int | None,
    init_backend: bool,
) -> DeviceMesh:
    """The root of these checked arguments; kept on the world, unless it is seen from another rank."""
    state = new_state(device_type, shape, ranks, names, rank=rank, init_backend=init_backend)
    world = _process.state.world
    if world is None or world.tables is None or world.rank != rank:
        return DeviceMesh._view_of(state, names, state.dims, 0)
    meshes = world.tables.meshes
    key = cache_key(state)
    if key not in meshes:
        meshes[key] = DeviceMesh._view_of(state, names, state.dims, 0)
    return meshes[key]


def _best_device() -> str:
    from hp_platform.platform import get_platform

    return get_platform().device().name
