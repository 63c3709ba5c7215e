"""Parameters that are DTensors and no mesh: they stay as they are, and units add up their gradients together, beside backward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_fsdp import fully_shard, get_model_state_dict, memory_plan
from hp_fsdp.states import ShardState
from hp_fsdp.unit import units_in
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, local, loss_of, sgd_step, tolerance

WIDTH, HIDDEN, ROWS = 4, 5, 6
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def build(world: World) -> Any:
    """A scale of the root, two blocks and a head."""
    maker = Maker(world)

    def setup(module: Any) -> None:
        module.scale = maker.parameter(WIDTH)
        module.blocks = maker.platform.ModuleList([maker.block(WIDTH, HIDDEN) for _ in range(2)])
        module.head = maker.linear(3, WIDTH)

    def forward(module: Any, x: Any, rank: int) -> Any:
        x = x * module.scale
        for block in module.blocks:
            x = block(x)
        return module.head(x)

    return maker.model(setup, forward)


@dataclass(frozen=True)
class Way:
    """How a model lies on a mesh."""

    ndim: int
    inputs: tuple[Any, ...]
    placements: dict[str, tuple[Any, ...]]
    """By the ends of names; others are Replicate."""
    data_dims: tuple[int, ...]
    """Mesh dims along which all uses of all parameters differ."""
    has_other_sums: bool = False
    """Whether activations, or parameters in other ways, are reduced as well."""

    def mesh(self, world: World) -> DeviceMesh:
        if self.ndim == 1:
            return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))
        inner = 2 if world.size % 2 == 0 else 1
        shape = (world.size // inner, inner)
        return init_device_mesh(world.device_type, shape, mesh_dim_names=("dp", "tp"))

    def of(self, name: str) -> tuple[Any, ...]:
        return next((p for end, p in self.placements.items() if name.endswith(end)), (R,) * self.ndim)


COLUMNS_AND_ROWS = {"inner.weight": (S0,), "inner.bias": (S0,), "outer.weight": (S1,)}
WAYS = {
    "replicate": Way(1, (S0,), {}, (0,)),
    "shard": Way(1, (R,), COLUMNS_AND_ROWS, (), has_other_sums=True),
    "replicate, replicate": Way(2, (S0, S1), {}, (0, 1)),
    "replicate, shard": Way(
        2, (S0, R), {name: (R, *p) for name, p in COLUMNS_AND_ROWS.items()}, (0,), has_other_sums=True
    ),
}


class Compat:
    """The model in one process, and as DTensors: with units, or (``units`` None) without."""

    def __init__(self, world: World, way: Way, units: Sequence[str] | None = (), **options: Any) -> None:
        self.world, self.platform, self.way, self.mesh = world, world.platform, way, way.mesh(world)
        self.reference, self.model = build(world), build(world)
        self._distribute()
        self.own = dict(self.platform.named_parameters(self.model))
        for name in () if units is None else (*(units or ("blocks.0", "blocks.1")), ""):
            fully_shard(self.platform.get_submodule(self.model, name), **options)
        self.units = list(units_in(self.platform, self.model))

    def _distribute(self) -> None:
        platform = self.platform
        for path, module in list(platform.named_modules(self.model)):
            for name, parameter in list(platform.named_parameters(module, recurse=False)):
                placements = self.way.of(f"{path}.{name}")
                dtensor = distribute_tensor(platform.detach(parameter), self.mesh, placements)
                platform.set_parameter(module, name, platform.parameter(dtensor))

    def values(self, batch: int) -> Any:
        maker = Maker(self.world)
        random = np.random.default_rng(batch)
        return self.platform.tensor(random.uniform(-1, 1, (ROWS, 2, WIDTH)), maker.dtype, maker.device)

    def inputs(self, batch: int) -> Any:
        return distribute_tensor(self.values(batch), self.mesh, self.way.inputs)

    def loss(self, batch: int) -> Any:
        return loss_of(self.platform, self.model(self.inputs(batch)))

    def reference_loss(self, batch: int) -> Any:
        return loss_of(self.platform, self.reference(self.values(batch)))

    def backward(self, batch: int) -> None:
        self.platform.backward([self.loss(batch)])

    def backward_of_reference(self, batch: int) -> None:
        self.platform.backward([self.reference_loss(batch)])

    def step(self) -> None:
        sgd_step(self.platform, self.reference)
        sgd_step(self.platform, self.model)

    def check(self, factor: float = 1.0) -> None:
        """The user's parameters are there, with the gradients of one process, placed as they are."""
        platform = self.platform
        found = dict(platform.named_parameters(self.model))
        assert list(found) == list(self.own)
        for name, whole in platform.named_parameters(self.reference):
            parameter, gradient = found[name], platform.get_grad(whole)
            assert parameter is self.own[name]
            limits = {**tolerance(self.world), "name": name}
            assert_parity(platform.detach(parameter), platform.detach(whole), **limits)
            if gradient is None:
                assert parameter.grad is None, name
                continue
            assert parameter.grad.placements == parameter.placements
            assert_parity(parameter.grad, gradient * factor, **limits)

    def sums(self, counted: Any, dim: int) -> tuple[int, int]:
        """Number and bytes of the all-reduces along a mesh dim."""
        group = self.mesh.get_group(dim)
        found = [x for x in counted.record.launches if x.kind == "all_reduce" and x.group is group]
        return len(found), sum(x.nbytes for x in found)

    @property
    def num_parameters(self) -> int:
        return len(self.own)

    def nbytes(self) -> int:
        """Of this rank's pieces of all parameters."""
        platform = self.platform
        return sum(
            int(np.prod(local(p).shape)) * platform.itemsize(local(p).dtype) for p in self.own.values()
        )


@pytest.mark.parametrize("name", WAYS)
@distributed(world_size=(1, 2, 3, 4))
def test_training_equals_one_process_and_gradients_are_added_up_once_per_unit(
    world: World, name: str
) -> None:
    way = WAYS[name]
    ours, plain = Compat(world, way), Compat(world, way, None)
    for step in range(3):
        with count_collectives() as sent:
            ours.backward(step)
        with count_collectives() as sent_without:
            plain.backward(step)
        ours.backward_of_reference(step)
        ours.check()
        for dim in range(way.ndim):
            many = ours.mesh.size(dim) > 1
            if dim in way.data_dims:
                assert ours.sums(sent, dim) == (3 * many, ours.nbytes() * many)
                assert plain.sums(sent_without, dim) == (ours.num_parameters * many, ours.nbytes() * many)
            else:
                assert ours.sums(sent, dim) == plain.sums(sent_without, dim)
        assert sent.nbytes() == sent_without.nbytes()
        for kind in {*sent.counts, *sent_without.counts} - {"all_reduce"}:
            assert sent.counts[kind] == sent_without.counts[kind], kind
        ours.step()
        sgd_step(world.platform, plain.model)
    assert all(unit.state is ShardState.SHARDED for unit in ours.units)


@distributed(world_size=(2, 3))
def test_sums_of_a_unit_run_while_the_one_before_it_runs_backward(world: World) -> None:
    ours, launched = Compat(world, WAYS["replicate"]), []
    platform = world.platform

    def note(_: Any) -> None:
        launched.append(len(counted.record.launches))

    def watch(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        platform.register_tensor_hook(output.to_local(), note)

    for block in ours.model.blocks:
        platform.register_forward_hook(block, watch)
    with count_collectives() as counted:
        ours.backward(0)
    assert launched == [0, 1], "when gradients reach the second block, and the first"
    counted.assert_counts(all_reduce=3)


@pytest.mark.parametrize("name", ["replicate", "replicate, shard"])
@distributed(world_size=(2, 4))
def test_micro_batches_are_added_up_once(world: World, name: str) -> None:
    ours = Compat(world, WAYS[name])
    for step in range(2):
        for part in range(3):
            ours.model.set_requires_gradient_sync(part == 2)
            with count_collectives() as sent:
                ours.backward(3 * step + part)
            ours.backward_of_reference(3 * step + part)
            many = ours.mesh.size(0) > 1
            assert ours.sums(sent, 0)[0] == (3 * many if part == 2 else 0)
            if part < 2:
                assert all(parameter.grad is None for parameter in ours.own.values())
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_without_fusion_operations_add_up_by_themselves(world: World) -> None:
    ours = Compat(world, WAYS["replicate"], comm_fusion=False)
    for step in range(2):
        with count_collectives() as sent:
            ours.backward(step)
        sent.assert_counts(all_reduce=ours.num_parameters)
        ours.backward_of_reference(step)
        ours.check()
        ours.step()


@distributed(world_size=(2, 3))
def test_parameters_may_be_used_alike_and_differently_inside_and_outside(world: World) -> None:
    """Also twice, and tied: the parts add up to the gradient of one process."""
    platform = world.platform
    ours = Compat(world, WAYS["replicate"], None)
    for model in (ours.reference, ours.model):
        model.blocks[1].outer.weight = model.blocks[0].outer.weight
    ours.own = dict(platform.named_parameters(ours.model))
    for module in (*ours.model.blocks, ours.model):
        fully_shard(module)

    def loss(model: Any, x: Any) -> Any:
        first = model.blocks[0]
        x = first(first(x))  # outside of the root: a root of its own, until the root runs
        penalty = platform.mean(model.head.weight * model.head.weight) + platform.mean(x * model.scale)
        return loss_of(platform, model(x)) + penalty

    for step in range(2):
        for model, x in ((ours.model, ours.inputs(step)), (ours.reference, ours.values(step))):

            def inside(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                return output + platform.mean(module.inner.weight * module.inner.weight)

            handle = platform.register_forward_hook(model.blocks[0], inside, prepend=True)
            platform.backward([loss(model, x)])
            handle.remove()
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_gradients_are_scaled_once_and_hooks_see_them_whole(world: World) -> None:
    ours, seen = Compat(world, WAYS["replicate"]), {}
    ours.model.set_gradient_scaling_factor(0.25)

    def hook_of(name: str) -> Any:
        def note(parameter: Any) -> None:
            seen[name] = world.platform.to_numpy(parameter.grad.full_tensor())

        return note

    for name, parameter in ours.own.items():
        parameter.register_post_accumulate_grad_hook(hook_of(name))
    ours.backward(0)
    ours.backward_of_reference(0)
    ours.check(0.25)
    for name, parameter in ours.own.items():
        assert_parity(seen[name], world.platform.to_numpy(parameter.grad.full_tensor()), exact=True)
    with pytest.raises(ValueError, match="^reduce_op_type 'sum': parameters of .* are DTensors that stay"):
        ours.model.set_reduce_op_type("sum")
    ours.model.zero_grad()
    assert all(parameter.grad is None for parameter in ours.own.values())


@distributed(world_size=2)
def test_frozen_and_unused_parameters_get_no_gradient(world: World) -> None:
    ours, platform = Compat(world, WAYS["replicate"]), world.platform
    for model in (ours.model, ours.reference):
        platform.set_requires_grad_(local(model.blocks[0].inner.weight), False)
        model.blocks[1].forward = lambda x: x * 2
    for step in range(2):
        with count_collectives() as sent:
            ours.backward(step)
        sent.assert_counts(all_reduce=2)
        ours.backward_of_reference(step)
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_a_failed_backward_adds_nothing(world: World) -> None:
    ours, platform = Compat(world, WAYS["replicate"]), world.platform

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    ours.model.set_requires_gradient_sync(False)
    ours.backward(0)
    ours.backward_of_reference(0)

    def watch(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        platform.register_tensor_hook(output.to_local(), fail)

    handle = platform.register_forward_hook(
        ours.model.blocks[1], watch
    )  # behind the head, before any unit is done
    with pytest.raises(ArithmeticError):
        ours.backward(1)
    handle.remove()
    ours.model.set_requires_gradient_sync(True)
    ours.backward(2)
    ours.backward_of_reference(2)
    ours.check()


@distributed(world_size=2)
def test_memory_of_other_values_and_states_are_as_ever(world: World) -> None:
    """``p.data = x`` puts other memory below a parameter; states are those of the DTensors."""
    ours, platform = Compat(world, WAYS["replicate"]), world.platform
    ours.backward(0)
    ours.backward_of_reference(0)
    ours.step()
    for name, parameter in ours.own.items():
        whole = dict(platform.named_parameters(ours.reference))[name]
        platform.set_data_(local(parameter), platform.clone(platform.detach(local(parameter))))
        assert_parity(platform.detach(parameter), platform.detach(whole), **tolerance(world))
    ours.backward(1)
    ours.backward_of_reference(1)
    ours.check()
    state = get_model_state_dict(ours.model)
    assert list(state) == list(ours.own)
    assert all(isinstance(value, DTensor) for value in state.values())
    assert memory_plan(ours.model).shards == ours.nbytes()


@distributed(world_size=2)
def test_a_tie_across_units_with_and_without_a_mesh_is_refused(world: World) -> None:
    platform, model, mesh = world.platform, build(world), init_device_mesh(world.device_type, (world.size,))
    for _, module in platform.named_modules(model.blocks[0]):
        for name, parameter in list(platform.named_parameters(module, recurse=False)):
            dtensor = distribute_tensor(platform.detach(parameter), mesh, [Replicate()])
            platform.set_parameter(module, name, platform.parameter(dtensor))
    fully_shard(model.blocks[0])
    model.blocks[1].outer.weight = model.blocks[0].outer.weight
    with pytest.raises(
        ValueError, match=r"^parameter 'blocks.1.outer.weight' of Model is also .*only one of"
    ):
        fully_shard(model, mesh)
    assert [unit.modules[0] for unit in units_in(platform, model)] == [model.blocks[0]]
