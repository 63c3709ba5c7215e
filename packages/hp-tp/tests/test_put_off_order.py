"""Gradients of weights behind a door are computed while the gradient of its input is on its way; what that takes, and if it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hp_dtensor import Replicate, Shard
from hp_platform.recording import record_collectives
from hp_platform.testing import World, distributed
from hp_tp.overlap.side_stream import Task
from hp_tp.styles import put_off

sys.path.insert(0, str(Path(__file__).parent))
from put_off_layers import (
    ALWAYS,
    BACKENDS,
    FEATURES,
    LENGTH,
    assert_same_bits,
    both,
    gradients,
    input_of,
    layers_of,
    mixed,
    put_off_from,
)
from style_layers import loss_of
from tp_models import make_mesh
from tp_training import local


# --------------------------------------------------------------------------------------------------------------------- order
@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["whole", "cut"])
@distributed(world_size=2, backends=BACKENDS)
def test_weights_follow_the_start_of_the_collective_and_its_end_follows_them(
    world: World, layout: Any
) -> None:
    platform, mesh = world.platform, make_mesh(world)
    wait = Task.wait

    def run() -> list[tuple[str, int]]:
        """What happened, and how many collectives had been started by then."""
        layers, x, events = layers_of(world, mesh, layout), input_of(world, layout), []

        def note(what: str) -> None:
            events.append((what, len(record.launches)))

        def waiting(task: Task) -> None:
            note("wait")
            wait(task)

        for layer in layers:
            platform.register_post_accumulate_grad_hook(local(layer.weight), lambda _: note("weight"))
        platform.register_tensor_hook(x, lambda _: note("input"))
        loss = mixed(world, layers, x)
        with record_collectives() as record, patch.object(Task, "wait", waiting):
            platform.backward([loss])
        return events

    plain, found = both(run)
    assert plain == [("weight", 0)] * 3 + [("input", 1)]
    assert found == [("weight", 1)] * 3 + [("wait", 1), ("input", 1)]


@distributed(world_size=2, backends=BACKENDS)
def test_small_inputs_and_those_that_lie_otherwise_are_not_put_off(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def is_put_off(layout: Any, x: Any, least: int) -> bool:
        layer = layers_of(world, mesh, layout, 1)[0]
        with put_off_from(least), patch.object(put_off, "_opened", wraps=put_off._opened) as opened:
            platform.backward([loss_of(world, layer(x))])
        return bool(opened.call_count)

    for layout, times in ((Replicate(), 1), (Shard(1), world.size)):
        x = input_of(world, layout)
        nbytes = times * 2 * LENGTH * FEATURES * platform.itemsize(x.dtype)  # of the whole input
        assert is_put_off(layout, x * 1, nbytes)
        assert not is_put_off(layout, x * 1, nbytes + 1)
    with platform.no_grad(), patch.object(put_off, "_opened") as opened, put_off_from(ALWAYS):
        layers_of(world, mesh, Replicate(), 1)[0](input_of(world, Replicate()) * 1)
    assert not opened.called


# ------------------------------------------------------------------------------------------------------------- memory, failures
@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["whole", "cut"])
@distributed(world_size=2, backends=BACKENDS)
def test_what_forward_keeps_for_backward_takes_no_more_memory(world: World, layout: Any) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def run() -> tuple[int, int]:
        """Tensors, and bytes at different places."""
        layers, x = layers_of(world, mesh, layout), input_of(world, layout)
        kept = []
        with platform.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = mixed(world, layers, x * 1)
        sizes = {
            platform.data_ptr(t): platform.itemsize(t.dtype) * int(np.prod(tuple(t.shape))) for t in kept
        }
        del loss
        return len(kept), sum(sizes.values())

    plain, found = both(run)
    assert found == plain


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["whole", "cut"])
@pytest.mark.parametrize("is_recorded", [False, True], ids=["plain", "recorded"])
@distributed(world_size=2, backends=BACKENDS)
def test_a_backward_that_fails_in_between_leaves_nothing_for_the_next(
    world: World, is_recorded: bool, layout: Any
) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def run(*, fails: bool) -> list[Any]:
        layers, x = layers_of(world, mesh, layout), input_of(world, layout)

        def fail(_: Any) -> None:
            raise RuntimeError("in the middle")

        loss = mixed(world, layers, x * 1)
        if fails:
            hook = platform.register_tensor_hook(local(layers[2].weight), fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                platform.backward([loss], retain_graph=True)
            hook.remove()
            for _, p in platform.named_parameters(layers):
                platform.set_grad(local(p), None)
        if is_recorded:  # of another gradient than the one that is left
            found = platform.grad([loss * 2], [x], create_graph=True)
            found = [*found, *platform.grad([found[0].sum()], [x])]
            return [platform.to_numpy(platform.detach(g)) for g in found]
        platform.backward([loss])
        return [*gradients(world, layers), platform.to_numpy(platform.get_grad(x))]

    with put_off_from(ALWAYS):
        assert_same_bits(run(fails=True), run(fails=False))
