"""Functions of torch in the place of Muon's iteration: exact polar factors, and what only torch can get wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_optim import Muon, sinkhorn
from hp_optim.offload.late import TIMINGS
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
import muon_oracle

CASES = {
    "rows": ((7, 5), (Shard(0),)),
    "columns": ((4, 9), (Shard(1),)),
    "fewer rows than ranks": ((1, 6), (Shard(0),)),
    "replicated": ((6, 4), (Replicate(),)),
    "experts": ((5, 4, 6), (Shard(0),)),
    "experts by columns": ((3, 6, 4), (Shard(2),)),
    "convolution": ((7, 2, 3, 1), (Shard(0),)),
    "rows again": ((7, 5), (Shard(0),)),
}


def polar(stack: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(stack, full_matrices=False)
    return u @ v


def array(name: str, step: int) -> np.ndarray:
    return np.random.default_rng([list(CASES).index(name), step]).normal(size=CASES[name][0])


class Run:
    """The cases on all ranks, and steps of them."""

    def __init__(self, world: World, dtype: str = "float64", kind: Any = Muon, **options: Any) -> None:
        self.world, self.dtype = world, world.platform.dtype(dtype)
        self.mesh = init_device_mesh(world.device_type, (world.size,))
        self.params = {name: self.placed(name, 0).requires_grad_(True) for name in CASES}
        self.optimizer = kind(self.params.items(), ns_dtype=dtype, memory_cap=3000, **options)

    def placed(self, name: str, step: int) -> Any:
        value = torch.from_numpy(array(name, step)).to(self.world.device, self.dtype)
        return distribute_tensor(value, self.mesh, CASES[name][1])

    def step(self, step: int) -> None:
        for name, p in self.params.items():
            p.grad = self.placed(name, step)
        self.optimizer.step()

    def wholes(self) -> dict[str, np.ndarray]:
        return {name: p.full_tensor().detach().cpu().numpy() for name, p in self.params.items()}


@distributed(world_size=[1, 2, 3], backends=["torch", "cuda"])
def test_exact_polar_factors_are_those_of_numpy_on_any_number_of_ranks(world: World) -> None:
    run = Run(world, ns_transform_fn=polar, lr=0.1)
    oracle = muon_oracle.Muon({name: array(name, 0) for name in CASES}, transform=muon_oracle.polar, lr=0.1)
    for step in (1, 2, 3):
        run.step(step)
        oracle.step({name: array(name, step) for name in CASES})
    for name, found in run.wholes().items():
        np.testing.assert_allclose(found, oracle.params[name], rtol=0, atol=1e-12, err_msg=name)


@distributed(world_size=2, backends=["torch", "cuda"])
def test_momentum_on_the_host_gives_the_same_bits(world: World) -> None:
    beside = Run(world, "float32", ns_transform_fn=sinkhorn())
    kinds = [type("Muon", (Muon,), {"MAKE_TRANSFERS": staticmethod(timing)}) for timing in TIMINGS]
    others = [
        Run(world, "float32", kind, ns_transform_fn=sinkhorn(), offload_state=True) for kind in (Muon, *kinds)
    ]
    for step in (1, 2, 3):
        for each in (beside, *others):
            each.step(step)
    for each in others:
        for name, found in each.wholes().items():
            assert np.array_equal(found, beside.wholes()[name]), name


@distributed(world_size=1, backends=["torch", "cuda"])
def test_a_result_on_another_device_or_sharded_is_refused(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    weight = torch.nn.Parameter(torch.ones(4, 3, device=world.device))
    weight.grad = torch.ones_like(weight)
    for function, error, message in (
        (lambda x: x.to("meta"), ValueError, r"returned a tensor on meta for a stack of matrices of w; expected"),
        (lambda x: distribute_tensor(x, mesh, [Replicate()]), TypeError, "returned a DTensor for a stack .* expected is a plain"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            Muon([("w", weight)], ns_transform_fn=function, ns_dtype="float32").step()


@distributed(world_size=[1, 2], backends=["torch", "cuda"])
def test_what_float16_holds_only_when_it_is_normalised_travels_in_float32(world: World) -> None:
    mesh, ends = init_device_mesh(world.device_type, (world.size,)), []
    for size in (1.0, 2.0**30, 2.0**-20):
        value = torch.from_numpy(array("rows", 1)).to(world.device, torch.float32)
        weight = distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]).requires_grad_(True)
        weight.grad = distribute_tensor(value * size, mesh, [Shard(0)])
        Muon([weight], lr=1.0, ns_dtype="float16").step()
        ends.append(weight.full_tensor().detach())
    assert ends[0].abs().max() > 0.1
    for other in ends[1:]:
        # What differs is the 1e-7 beside the norm, which is 6e-6 for the small one.
        torch.testing.assert_close(other, ends[0], rtol=0, atol=5e-3)
