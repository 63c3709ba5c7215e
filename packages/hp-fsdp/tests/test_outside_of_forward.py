"""Computing with a module while it shows pieces is refused, whatever the way to it; other methods are registered."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Replicate, distribute_tensor
from hp_fsdp import fully_shard, register_forward_method
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, local, loss_of, make_mesh, numpy_of, sgd_step, tolerance, whole


def coder(maker: Maker) -> Any:
    """A module with methods beside forward: ``encode`` and ``decode``, with a block that may be a unit of its own."""
    platform = maker.platform

    class Coder(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = maker.block(4, 5)
            self.matrix = maker.parameter(3, 4)
            self.scale = maker.parameter()

        def encode(self, x: Any) -> Any:
            return platform.linear(self.inner(x), self.matrix)

        def decode(self, y: Any, *, twice: bool = False) -> Any:
            z = platform.matmul(y, self.matrix) * self.scale
            return {"z": z, "extra": [z + z] if twice else []}

        def forward(self, x: Any) -> Any:
            # What is whole in here stays so when a registered method, called from here, has ended.
            return self.decode(self.encode(x))["z"] * self.scale

        def generate(self, x: Any) -> Any:
            for _ in range(2):
                x = self(x)
            return self.scaled(x)

        def transposed(self, x: Any) -> Any:
            return platform.matmul(x, platform.transpose(self.matrix, 0, 1))

        def scaled(self, x: Any) -> Any:
            return x * self.scale

    return Coder()


def inputs(world: World, seed: int = 0, rank: int | None = None) -> Any:
    maker = Maker(world)
    random = np.random.default_rng(10 * seed + (world.rank if rank is None else rank))
    return maker.platform.tensor(random.uniform(-1, 1, (3, 4)), maker.dtype, maker.device)


@distributed(world_size=(1, 2))
def test_a_method_that_is_not_registered_is_refused_by_name(world: World) -> None:
    platform = world.platform
    for has_unit in (False, True):
        model, mesh = coder(Maker(world)), make_mesh(world)
        if has_unit:
            fully_shard(model.inner, mesh)
        fully_shard(model, mesh)
        x = inputs(world)
        wide = platform.set_requires_grad_(inputs(world), True)
        for method in ("encode", "transposed", "scaled"):
            for given in (x, wide):
                with pytest.raises(RuntimeError, match=rf"register_forward_method\(module, '{method}'\)"):
                    getattr(model, method)(given)
                with platform.no_grad(), pytest.raises(RuntimeError, match="only kept in pieces"):
                    getattr(model, method)(given)
        model(x)  # as if nothing had happened
        with pytest.raises(RuntimeError, match=r"register_forward_method\(module, 'encode'\)"):
            model.encode(x)  # also when a forward has been before, and its root has not been re-sharded


@distributed(world_size=2)
def test_a_module_inside_of_a_unit_is_not_called_alone(world: World) -> None:
    model = fully_shard(coder(Maker(world)), make_mesh(world))
    with pytest.raises(RuntimeError, match=r"Call that module itself.*; in "):
        model.inner.inner(inputs(world))
    with pytest.raises(RuntimeError, match="Call that module itself"):
        inputs(world) * model.scale


@distributed(world_size=2)
def test_what_is_no_computation_on_samples_goes_on(world: World) -> None:
    """Numbers, writing into a parameter, DTensors that somebody has distributed."""
    platform = world.platform
    model, mesh = fully_shard(coder(Maker(world)), make_mesh(world)), make_mesh(world)
    reference = coder(Maker(world))
    number = platform.full((), 0.5, Maker(world).dtype, world.device)
    values = platform.detach(reference.matrix)
    matrix = model.matrix
    with platform.no_grad():
        assert_parity(platform.detach((matrix * number).full_tensor()), values * number, exact=True)
        if platform.supports("write_into_view", world.device):
            matrix.copy_(values * 2)
            matrix.mul_(number)
        assert_parity(platform.detach(matrix.full_tensor()), values, exact=True)
    replicated = distribute_tensor(values, mesh, [Replicate()])
    for product in (replicated * matrix, matrix * replicated):
        assert isinstance(product, DTensor)
        assert_parity(platform.detach((product * values).full_tensor()), values * values * values, exact=True)


def gradients_agree(world: World, model: Any, reference: Any, mesh: Any) -> None:
    platform = world.platform
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    assert_parity(
        whole(world, model, shapes, mesh, platform.get_grad),
        numpy_of(platform, reference, platform.get_grad),
        **tolerance(world),
    )


@pytest.mark.parametrize("has_unit", [False, True])
@distributed(world_size=2)
def test_registered_methods_train_as_in_one_process(world: World, has_unit: bool) -> None:
    """Three ways through the model, mixed in one step: forward, one method, and two methods after each other."""
    platform = world.platform
    reference, model, mesh = coder(Maker(world)), coder(Maker(world)), make_mesh(world)
    if has_unit:
        fully_shard(model.inner, mesh)
    fully_shard(model, mesh)
    for method in ("encode", "decode", "scaled", "generate"):
        register_forward_method(model, method)

    def by_methods(module: Any, seed: int, rank: int) -> Any:
        x = inputs(world, seed, rank)
        found = module.decode(module.encode(x), twice=True)
        return loss_of(platform, found["extra"][0]) + loss_of(platform, module.scaled(x))

    def by_forward(module: Any, seed: int, rank: int) -> Any:
        return loss_of(platform, module(inputs(world, seed, rank)))

    def both(module: Any, seed: int, rank: int) -> Any:
        return by_methods(module, seed, rank) + by_forward(module, seed + 5, rank)

    def by_calls_within(module: Any, seed: int, rank: int) -> Any:
        return loss_of(platform, module.generate(inputs(world, seed, rank)))

    for step, way in enumerate((by_methods, by_forward, both, by_calls_within, by_methods)):
        platform.backward([way(model, step, world.rank)])
        total = way(reference, step, 0)
        for rank in range(1, world.size):
            total = total + way(reference, step, rank)
        platform.backward([total / world.size])
        gradients_agree(world, model, reference, mesh)
        sgd_step(platform, model)
        sgd_step(platform, reference)
        assert all(isinstance(p, DTensor) for _, p in platform.named_parameters(model))


@distributed(world_size=2)
def test_a_registered_method_gathers_and_reduces_like_forward(world: World) -> None:
    platform = world.platform
    model, mesh = coder(Maker(world)), make_mesh(world)
    fully_shard(model.inner, mesh)
    fully_shard(model, mesh)
    register_forward_method(model, "encode")
    with count_collectives() as counted:
        platform.backward([loss_of(platform, model.encode(inputs(world)))])
    counted.assert_counts(all_gather=3, reduce_scatter=2)  # inner twice, the root once
    with count_collectives() as counted, platform.no_grad():
        model.encode(inputs(world))
    counted.assert_counts(all_gather=2)
    register_forward_method(model, "generate")
    with count_collectives() as counted, platform.no_grad():
        model.generate(inputs(world))
    counted.assert_counts(all_gather=3)  # inner for each of two calls, the root once
    assert tuple(local(model.matrix).shape) == ((2, 4) if world.rank == 0 else (1, 4))


@distributed(world_size=2)
def test_registered_methods_that_fail_leave_nothing_behind(world: World) -> None:
    platform = world.platform
    reference, model, mesh = coder(Maker(world)), coder(Maker(world)), make_mesh(world)
    fully_shard(model.inner, mesh)
    fully_shard(model, mesh)
    register_forward_method(model, "generate")
    for place in ("inner", "self"):
        target = model.inner if place == "inner" else model

        def fail(*_: Any) -> None:
            raise RuntimeError("in the middle")

        handle = platform.register_forward_hook(target, fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model.generate(inputs(world))
        with pytest.raises(RuntimeError, match="in the middle"):
            model(inputs(world))
        handle.remove()
        sgd_step(platform, model)
        for each in (model, reference):
            platform.fill_(local(each.scale), 0.25 if place == "inner" else 0.75)
        with platform.no_grad():
            assert_parity(
                model.generate(inputs(world)), reference.generate(inputs(world)), **tolerance(world)
            )


@distributed(world_size=1)
def test_registering_needs_a_method_and_leaves_other_modules_alone(world: World) -> None:
    model = coder(Maker(world))
    before = model.encode
    register_forward_method(model, "encode")
    assert model.encode == before
    with pytest.raises(ValueError, match="Coder has no method 'nothing'"):
        register_forward_method(model, "nothing")


@pytest.mark.parametrize("is_method", [False, True], ids=["forward", "a registered method"])
@distributed(world_size=2)
def test_a_call_that_yields_is_refused_with_what_to_return(world: World, is_method: bool) -> None:
    """Its body would run when forward has ended, and compute with pieces."""
    platform, block = world.platform, Maker(world).block(4, 5)

    class Yielding(platform.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def parts(self, x: Any) -> Any:
            yield self.block(x)

        def forward(self, x: Any) -> Any:
            return self.block(x) if is_method else self.parts(x)

    model = fully_shard(Yielding(), make_mesh(world))
    register_forward_method(model, "parts")
    call = model.parts if is_method else model
    message = (
        r"a call of Yielding gave a generator, whose body runs when the call has ended, .*return a list of"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            call(inputs(world))
        assert not any(
            platform.storage_nbytes(param.full)
            for param in model._hp_fsdp_unit.params
            if param.full is not None and not param.is_alias
        )
    if is_method:
        platform.backward([loss_of(platform, model(inputs(world)))])
