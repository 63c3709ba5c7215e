"""torch.utils.checkpoint inside of units, around them and in each other, with dropout: numbers of one process, no more gathers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from hp_fsdp import fully_shard
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import (
    CLOSE,
    SAMPLES,
    TORCH,
    WIDTH,
    batch,
    gradients,
    loss_of,
    make_mesh,
    meshes,
    parameters,
)

Tensor = torch.Tensor
Run = Callable[..., Any]


def plainly(function: Run, *args: Any) -> Any:
    return function(*args)


def saving_products(function: Run, *args: Any) -> Any:
    """Products are kept, all else is recomputed."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, *args, use_reentrant=False, context_fn=context)


def to_the_end(function: Run, *args: Any) -> Any:
    """Recomputed to the last operation, also where nobody needs it."""
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False)


RECOMPUTING: dict[str, Run] = {
    "plainly": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "to the end": to_the_end,
    "selective": saving_products,
}


class Block(torch.nn.Module):
    def __init__(self, inside: Run) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.3)
        self.inside = inside

    def mlp(self, x: Tensor) -> Tensor:
        return self.drop(self.outer(torch.nn.functional.gelu(self.inner(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inside(self.mlp, self.norm(x)))


class Model(torch.nn.Module):
    """Three blocks; where checkpoints are is told by functions that call what they are given."""

    def __init__(self, inside: Run = plainly, around: Run = plainly, over_two: Run = plainly) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(inside) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.around, self.over_two = around, over_two

    def first_two(self, x: Tensor) -> Tensor:
        return self.around(self.blocks[1], self.around(self.blocks[0], x))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.around(self.blocks[2], self.over_two(self.first_two, self.embed(ids))))


class InSequence(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = checkpoint_sequential(self.blocks, 2, self.embed(ids), use_reentrant=False)
        return self.head(x)


def make(world: World, kind: type[Model] = Model, **where: Run) -> Any:
    torch.manual_seed(3)
    return kind(**where).double().to(world.device)


def shard(model: Any, mesh: DeviceMesh, **kwargs: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh, **kwargs)
    return fully_shard(model, mesh, **kwargs)


def reference_backward(world: World, reference: Any, step: int) -> None:
    """The samples of each rank with its random numbers; the mean of their losses."""
    everything, _ = batch(world, step)
    for rank in range(world.size):
        torch.manual_seed(100 * step + rank)
        (loss_of(reference, everything[SAMPLES * rank :][:SAMPLES]) / world.size).backward()


class Reference:
    """Two steps in one process: the gradients of each, and the parameters after them."""

    def __init__(self, world: World) -> None:
        model = make(world)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.gradients = []
        for step in range(2):
            reference_backward(world, model, step)
            self.gradients.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        self.parameters = parameters(model)


def check_steps(world: World, reference: Reference, model: Any, run: Run = plainly) -> None:
    """The same steps of the sharded model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, wanted in enumerate(reference.gradients):
        torch.manual_seed(100 * step + world.rank)
        loss_of(lambda ids: run(model, ids), batch(world, step)[1]).backward()
        assert_parity(gradients(model), wanted, **CLOSE, name=f"step {step}")
        optimizer.step()
        optimizer.zero_grad()
    assert_parity(parameters(model), reference.parameters, **CLOSE)


PLACES = ("inside", "around", "over_two")


@pytest.mark.parametrize("kind", RECOMPUTING)
@distributed(world_size=(1, 2, 3, 4), backends=TORCH)
def test_recomputed_blocks_with_dropout_equal_one_process(world: World, kind: str) -> None:
    reference = Reference(world)
    for mesh, place in itertools.product(meshes(world), PLACES):
        # Blocks that stay whole need no gather in backward; one place shows it.
        for reshard in (True, False) if place == "around" else (True,):
            model = make(world, **{place: RECOMPUTING[kind]})
            check_steps(world, reference, shard(model, mesh, reshard_after_forward=reshard))


@pytest.mark.parametrize(
    ("outer", "inner"), [("plainly", "plainly"), ("reentrant", "plainly"), ("plainly", "to the end")]
)
@distributed(world_size=2, backends=TORCH)
def test_checkpoints_in_checkpoints_equal_one_process(world: World, outer: str, inner: str) -> None:
    reference = Reference(world)
    outside, within = RECOMPUTING[outer], RECOMPUTING[inner]
    for where in (
        {"around": outside, "inside": within},
        {"over_two": outside, "around": within},
        {"over_two": outside, "inside": within},
        {"over_two": outside, "around": within, "inside": within},
    ):
        check_steps(world, reference, shard(make(world, **where), make_mesh(world)))


@distributed(world_size=2, backends=TORCH)
def test_whole_models_and_segments_of_sequences_are_recomputed(world: World) -> None:
    reference = Reference(world)
    for kind in ("plainly", "to the end", "selective"):
        check_steps(world, reference, shard(make(world), make_mesh(world)), RECOMPUTING[kind])
    check_steps(world, reference, shard(make(world, InSequence), make_mesh(world)))


@pytest.mark.parametrize("kind", RECOMPUTING)
@distributed(world_size=2, backends=TORCH)
def test_recomputing_adds_no_collective(world: World, kind: str) -> None:
    """Each block gathers for forward and for backward, the root once, and all reduce once."""
    for place in PLACES:
        model = shard(make(world, **{place: RECOMPUTING[kind]}), make_mesh(world))
        for step in range(2):
            with count_collectives() as counted:
                loss_of(model, batch(world, step)[1]).backward()
            found = (place, counted.counts)
            assert found == (place, {"all_gather": 7, "reduce_scatter": 4})


@pytest.mark.parametrize("kind", ["plainly", "reentrant"])
@distributed(world_size=2, backends=TORCH)
def test_gradients_of_micro_batches_add_up_where_blocks_are_recomputed(world: World, kind: str) -> None:
    reference = make(world)
    model = shard(make(world, around=RECOMPUTING[kind]), make_mesh(world))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        reference_backward(world, reference, step)
        torch.manual_seed(100 * step + world.rank)
        loss_of(model, batch(world, step)[1]).backward()
    assert_parity(gradients(model), gradients(reference), **CLOSE)


@distributed(world_size=2, backends=TORCH)
def test_activations_that_wait_on_the_host_come_back(world: World) -> None:
    def on_host(function: Run, *args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return function(*args)

    reference = Reference(world)
    for place in PLACES:
        check_steps(world, reference, shard(make(world, **{place: on_host}), make_mesh(world)))
