"""torch.compile of blocks: hooks run as they are, forwards are compiled once, numbers are those of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import (
    CLOSE,
    TORCH,
    Block,
    Model,
    batch,
    gradients,
    loss_of,
    make,
    make_mesh,
    parameters,
    shard,
)

# dynamo looks at `.grad` of what is no leaf, which torch warns of, and makes a Function, which torch deprecates. Where there is a
# GPU, dynamo.reset() imports inductor, whose modules for mkldnn are made by a decorator that torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
BACKEND = "aot_eager"
"""Graphs of forward and backward as every compiler gets them, run by torch's own kernels."""


def method_before(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND)
    shard(model, mesh)


def method_after(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    for block in model.blocks:
        block.compile(backend=BACKEND)


def wrapped_before(model: Model, mesh: DeviceMesh) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=BACKEND)
    shard(model, mesh)


def wrapped_after(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=BACKEND)


def forward_alone(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=BACKEND, fullgraph=True)


def method_without_breaks(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)


def wrapped_without_breaks(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=BACKEND, fullgraph=True)


def whole_model(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    model.compile(backend=BACKEND)


def whole_model_in_one_unit(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh)
    model.compile(backend=BACKEND)


WAYS: dict[str, Callable[[Model, DeviceMesh], None]] = {
    way.__name__: way
    for way in (
        method_before,
        method_after,
        wrapped_before,
        wrapped_after,
        forward_alone,
        method_without_breaks,
        wrapped_without_breaks,
        whole_model,
        whole_model_in_one_unit,
    )
}


def compiled_so_far() -> tuple[int, int]:
    """Numbers of graphs, and of attempts to make one."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def check_steps(world: World, reference: Model, model: Any, num_steps: int = 4) -> None:
    """Parity of gradients and parameters, and nothing compiled after the second step."""
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (reference, model)]
    begin = compiled_so_far()
    compiled = []
    for step in range(num_steps):
        for each, samples in zip((reference, model), batch(world, step), strict=True):
            loss_of(each, samples).backward()
        assert_parity(
            list(gradients(model).values()), list(gradients(reference).values()), **CLOSE, name=f"step {step}"
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compiled.append(compiled_so_far())
    assert_parity(list(parameters(model).values()), list(parameters(reference).values()), **CLOSE)
    assert compiled[0][0] > begin[0], "something was compiled"
    assert compiled[1:] == compiled[1:2] * (num_steps - 1), "nothing is compiled again"


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2, backends=TORCH, timeout=180)
def test_compiled_blocks_give_the_numbers_of_one_process_and_are_compiled_once(
    world: World, way: str
) -> None:
    torch._dynamo.reset()
    reference, model = make(world), make(world)
    WAYS[way](model, make_mesh(world))
    check_steps(world, reference, model)


@distributed(world_size=2, backends=TORCH, timeout=180)
def test_one_graph_serves_all_blocks_in_training_and_one_in_evaluation(world: World) -> None:
    torch._dynamo.reset()
    reference, model = make(world), make(world)
    method_after(model, make_mesh(world))
    before, _ = compiled_so_far()
    for step in range(3):
        for each, samples in zip((reference, model), batch(world, step), strict=True):
            loss_of(each, samples).backward()
        with torch.no_grad():
            samples = batch(world, step)[1]
            assert_parity(model(samples), reference(samples), **CLOSE)
    assert_parity(gradients(model), gradients(reference), **CLOSE)
    assert compiled_so_far()[0] - before == 2


@distributed(world_size=2, backends=TORCH, timeout=180)
def test_compiled_blocks_communicate_as_others_do(world: World) -> None:
    torch._dynamo.reset()
    plain, compiled = shard(make(world), make_mesh(world)), make(world)
    method_before(compiled, make_mesh(world))
    for step in range(2):
        counts = []
        for model in (plain, compiled):
            with count_collectives() as counted:
                loss_of(model, batch(world, step)[1]).backward()
            counts.append((counted.counts, counted.nbytes()))
        assert counts[0] == counts[1]


class Recomputing(Model):
    """Blocks are recomputed in backward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x) * self.scale


@distributed(world_size=2, backends=TORCH, timeout=180)
def test_compiled_blocks_are_recomputed(world: World) -> None:
    torch._dynamo.reset()
    reference, model = make(world), make(world)
    model.__class__ = Recomputing
    method_before(model, make_mesh(world))
    check_steps(world, reference, model)


class Failing(Block):
    """On what is not a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise ArithmeticError("not a number")
        return y


@pytest.mark.parametrize("way", ["method_after", "wrapped_after", "whole_model"])
@distributed(world_size=2, backends=TORCH, timeout=180)
def test_compiled_blocks_that_fail_leave_shards(world: World, way: str) -> None:
    torch._dynamo.reset()
    reference, model = make(world), make(world)
    blocks = list(model.blocks)
    for block in blocks:
        block.__class__, block.fails = Failing, False
    WAYS[way](model, make_mesh(world))
    own = dict(model.named_parameters())
    check_steps(world, reference, model, 2)
    blocks[1].fails = True
    with pytest.raises(ArithmeticError, match="not a number"):
        model(batch(world, 2)[1])
    assert all(found is own[name] for name, found in model.named_parameters())
    blocks[1].fails = False
    for each, samples in zip((reference, model), batch(world, 2), strict=True):
        loss_of(each, samples).backward()
    assert_parity(list(gradients(model).values()), list(gradients(reference).values()), **CLOSE)


@distributed(world_size=2, backends=TORCH, timeout=180)
def test_frozen_parameters_stay_frozen_in_compiled_blocks(world: World) -> None:
    torch._dynamo.reset()
    models = (make(world), make(world))
    for model in models:
        for block in model.blocks:
            block.inner.requires_grad_(False)
    method_after(models[1], make_mesh(world))
    check_steps(world, *models)
    assert models[1].blocks[0].inner.weight.grad is None
    assert isinstance(models[1].blocks[0], Block)


@distributed(world_size=2, backends=TORCH, timeout=180)
def test_compiled_blocks_compute_in_the_dtype_of_the_policy(world: World) -> None:
    torch._dynamo.reset()
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    plain, compiled = (shard(make(world).float(), make_mesh(world), mp_policy=policy) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend=BACKEND)
    before, _ = compiled_so_far()
    for step in range(3):
        for model in (plain, compiled):
            model.zero_grad()
            loss_of(model, batch(world, step)[1]).backward()
        # The same kernels on the same numbers.
        assert_parity(gradients(compiled), gradients(plain), exact=True)
    assert compiled_so_far()[0] - before == 1
