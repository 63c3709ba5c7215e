"""Redistribution beside torch.distributed.tensor: the same pieces, and never more bytes, counted as a ring sends them."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    redistribute_plan,
)
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

SHARE: dict[str, Callable[[int], float]] = {
    # What a rank sends, as a multiple of the bytes of its input, with n ranks in a ring.
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
}
OF_OUTPUT: dict[str, Callable[[int], float]] = {
    # The same for our records, which count a gather by its output.
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


class _TheirBytes(TorchDispatchMode):
    """Adds up what torch's functional collectives send."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and not self.paused:
            name = func._schema.name.split("::")[1]
            if name in SHARE:
                size = dist.distributed_c10d._resolve_process_group(args[-1]).size()
                self.total = self.total + args[0].nbytes * SHARE[name](size)
            else:
                assert name in ("wait_tensor", "_wrap_tensor_autograd"), f"{name} is not counted"
        return func(*args, **kwargs or {})


def _their_bytes(x: theirs.DTensor, to: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[theirs.DTensor, float]:
    counted, original = _TheirBytes(), placement_types.shard_dim_alltoall

    def as_on_a_device(
        x: torch.Tensor, gather: int, shard: int, mesh: TorchMesh, mesh_dim: int
    ) -> torch.Tensor:
        # On cpu torch gathers the whole here; that it is an all-to-all elsewhere is what counts.
        n = mesh.size(mesh_dim)
        counted.total = counted.total + x.nbytes * (n - 1) / n
        counted.paused = True
        try:
            return original(x, gather, shard, mesh, mesh_dim)
        finally:
            counted.paused = False

    monkeypatch.setattr(placement_types, "shard_dim_alltoall", as_on_a_device)
    with counted:
        y = x.redistribute(placements=to)
        y.to_local()
    return y, counted.total


def _our_bytes(x: DTensor, to: Any) -> tuple[DTensor, float]:
    # An exchange counts only what travels; other all-to-alls count a rank's own part, too.
    travels = any(step.kind == "exchange" for step in redistribute_plan(x, placements=to).steps)
    with count_collectives() as counted:
        y = x.redistribute(placements=to)
    total = 0.0
    for launch in counted.record.launches:
        share = 1.0 if travels and launch.kind == "all_to_all" else OF_OUTPUT[launch.kind](launch.group.size)
        total = total + launch.nbytes * share
    return y, total


def _torchs(placement: Placement) -> Any:
    if isinstance(placement, StridedShard):
        return placement_types._StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    if isinstance(placement, Partial):
        return theirs.Partial("product" if placement.reduce_op == "prod" else placement.reduce_op)
    return theirs.Replicate()


KINDS: list[Placement] = [
    Shard(0),
    Shard(1),
    Replicate(),
    *(Partial(op) for op in ("sum", "avg", "max", "prod")),
]


def _pairs(mesh: tuple[int, ...], count: int) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    ways = list(itertools.product(KINDS, repeat=len(mesh)))
    if len(mesh) == 2:
        ways = [*ways, (StridedShard(0, mesh[1]), Shard(0)), (StridedShard(1, mesh[1]), Shard(1))]
    # Only torch's own rules make a Partial there.
    pairs = [
        (source, target)
        for source, target in itertools.product(ways, ways)
        if all(not wanted.is_partial() or wanted == now for now, wanted in zip(source, target, strict=True))
    ]
    return random.Random(0).sample(pairs, min(count, len(pairs)))


@distributed(world_size=4, backends=("torch", "cuda"), timeout=120)
def test_no_pair_of_placements_moves_more_bytes_than_torch(world: World) -> None:
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    for mesh_shape in ((4,), (2, 2)):
        ranks: Any = [0, 1, 2, 3] if len(mesh_shape) == 1 else [[0, 1], [2, 3]]
        mesh, torchs = DeviceMesh(world.device_type, ranks), TorchMesh(world.device_type, ranks)
        for shape in ((8, 4), (5, 3)):
            for source, target in _pairs(mesh_shape, 60):
                strided = any(isinstance(p, StridedShard) for p in (*source, *target))
                if strided and shape != (8, 4):
                    continue  # torch cuts uneven dims otherwise there
                kinds = [{p for p in side if isinstance(p, Partial)} for side in (source, target)]
                if any(len(kind) > 1 for kind in kinds):
                    continue  # torch takes one reduction at a time
                name = f"{shape} on {mesh_shape} from {source} to {target}"
                full = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64, device=world.device)
                x = distribute_tensor(full.reshape(shape), mesh, source)
                other = theirs.DTensor.from_local(
                    x.to_local(),
                    torchs,
                    [_torchs(p) for p in source],
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=(shape[1], 1),
                )
                y, ours = _our_bytes(x, target)
                with pytest.MonkeyPatch.context() as monkeypatch:
                    found, torch_bytes = _their_bytes(other, [_torchs(p) for p in target], monkeypatch)
                if not any(p.is_partial() for p in target):
                    assert_parity(found.to_local(), y.to_local(), exact=True, name=name)
                totals = torch.tensor([ours, torch_bytes], dtype=torch.float64, device=world.device)
                dist.all_reduce(totals)
                sums = sums + totals
                assert totals[0] <= totals[1] + 1e-9, f"{name}: ours {totals[0]}, torch {totals[1]}"
    # Clearly less in all: no joins of outer cuts, and no padding of uneven ones.
    assert 0 < sums[0] < 0.95 * sums[1], f"all pairs together: ours {sums[0]}, torch {sums[1]}"
