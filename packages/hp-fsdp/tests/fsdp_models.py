"""Small models, written once on the platform, and the two ways to train them: sharded, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor import DTensor
from hp_dtensor.chunk import chunk_sizes
from hp_fsdp import fully_shard
from hp_platform import DeviceMesh, collectives, get_platform, init_device_mesh
from hp_platform.testing import World, assert_parity

ROWS = 3
"""Samples of each rank."""
LEARNING_RATE = 0.1


def dtype_of(world: World) -> str:
    """The widest dtype in which the device computes."""
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def tolerance(world: World) -> dict[str, float]:
    """Sums over ranks and samples run in another order than in one process: some units in the last place of values near 1,
    over three steps. Measured: below 1e-15 in float64 and 5e-7 in float32."""
    return {"rtol": 0.0, "atol": 1e-13 if dtype_of(world) == "float64" else 1e-5}


class Maker:
    """Makes parameters and modules of one dtype on one device; the same numbers at every call."""

    def __init__(self, world: World, dtype: str | None = None) -> None:
        self.platform = world.platform
        self.device = world.device
        self.widest = dtype_of(world)
        self.dtype = dtype or self.widest
        self.random = np.random.default_rng(7)

    def parameter(self, *shape: int, requires_grad: bool = True) -> Any:
        values = self.random.uniform(-0.5, 0.5, shape)
        return self.platform.parameter(
            self.platform.tensor(np.asarray(values), self.dtype, self.device), requires_grad
        )

    def linear(self, rows: int, columns: int, requires_grad: bool = True) -> Any:
        """``x @ weight.T + bias`` with ``weight (rows, columns)``."""
        platform = self.platform

        class Linear(platform.Module):
            def __init__(module) -> None:
                super().__init__()
                module.weight = self.parameter(rows, columns, requires_grad=requires_grad)
                module.bias = self.parameter(rows, requires_grad=requires_grad)

            def forward(module, x: Any) -> Any:
                return platform.linear(x, module.weight, module.bias)

        return Linear()

    def block(self, width: int, hidden: int, **kwargs: Any) -> Any:
        """``x + outer(silu(inner(x)))``."""
        platform = self.platform

        class Block(platform.Module):
            def __init__(module) -> None:
                super().__init__()
                module.inner = self.linear(hidden, width)
                module.outer = self.linear(width, hidden, **kwargs)

            def forward(module, x: Any) -> Any:
                return x + module.outer(platform.silu(module.inner(x)))

        return Block()

    def embedding(self, vocabulary: int, width: int) -> Any:
        platform = self.platform

        class Embedding(platform.Module):
            def __init__(module) -> None:
                super().__init__()
                module.weight = self.parameter(vocabulary, width)

            def forward(module, ids: Any) -> Any:
                return platform.embedding(ids, module.weight)

        return Embedding()

    def model(self, setup: Callable[[Any], None], forward: Callable[[Any, Any, int], Any]) -> Any:
        """A module with these two methods; forward also takes the rank whose samples it sees."""

        class Model(self.platform.Module):  # type: ignore[name-defined]
            def __init__(module) -> None:
                super().__init__()
                setup(module)

            def forward(module, x: Any, rank: int = 0) -> Any:
                return forward(module, x, rank)

        return Model()


@dataclass(frozen=True)
class Program:
    """A model, what of it becomes a unit (besides the whole), and what it reads."""

    build: Callable[[Maker], Any]
    units: tuple[str, ...] = ()
    vocabulary: int = 0
    """Of integer inputs; 0: floats."""
    width: int = 4

    def inputs(self, maker: Maker, rank: int, step: int) -> Any:
        random = np.random.default_rng(100 * step + rank)
        if self.vocabulary:
            ids = random.integers(0, self.vocabulary, (ROWS, 2))
            return maker.platform.tensor(ids, "int64", maker.device)
        return maker.platform.tensor(random.uniform(-1, 1, (ROWS, self.width)), maker.dtype, maker.device)

    def shard(self, model: Any, mesh: DeviceMesh, **kwargs: Any) -> Any:
        for name in self.units:
            fully_shard(get_platform().get_submodule(model, name), mesh, **kwargs)
        return fully_shard(model, mesh, **kwargs)


def mlp(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.blocks = maker.platform.ModuleList([maker.block(4, 5), maker.block(4, 7)])
        module.head = maker.linear(3, 4)

    def forward(module: Any, x: Any, rank: int) -> Any:
        for block in module.blocks:
            x = block(x)
        return module.head(x)

    return maker.model(setup, forward)


def tied(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.embed = maker.embedding(5, 4)
        module.block = maker.block(4, 6)
        module.head = maker.linear(5, 4)
        module.head.weight = module.embed.weight

    def forward(module: Any, ids: Any, rank: int) -> Any:
        return module.head(module.block(module.embed(ids)))

    return maker.model(setup, forward)


def twice(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.block = maker.block(4, 5)

    def forward(module: Any, x: Any, rank: int) -> Any:
        return module.block(module.block(x))

    return maker.model(setup, forward)


def branches(maker: Maker) -> Any:
    """One branch is taken by rank 0 alone, one by nobody; the choice is made inside of one unit."""

    def setup(module: Any) -> None:
        module.first = maker.linear(4, 4)
        module.only_rank_0 = maker.linear(4, 4)
        module.nobody = maker.linear(4, 4)

    def forward(module: Any, x: Any, rank: int) -> Any:
        x = module.first(x)
        return module.only_rank_0(x) if rank == 0 else x * 2

    inner = maker.model(setup, forward)

    def outer(module: Any) -> None:
        module.before = maker.linear(4, 4)
        module.choice = inner

    return maker.model(outer, lambda module, x, rank: module.choice(module.before(x), rank=rank))


def frozen(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.block = maker.block(4, 5, requires_grad=False)
        module.still = maker.linear(4, 4, requires_grad=False)
        module.head = maker.linear(2, 4)

    def forward(module: Any, x: Any, rank: int) -> Any:
        return module.head(module.still(module.block(x)))

    return maker.model(setup, forward)


def scalars(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.scale = maker.parameter()
        module.unused = maker.parameter()
        module.inner = maker.linear(4, 4)

    part = maker.model(setup, lambda module, x, rank: module.inner(x) * module.scale)

    def outer(module: Any) -> None:
        module.part = part
        module.shift = maker.parameter()

    return maker.model(outer, lambda module, x, rank: module.part(x) + module.shift)


def uneven(maker: Maker) -> Any:
    """Parameters of 1, 2, 3, 5 and 17 rows in one unit, some of them fewer than ranks."""

    def setup(module: Any) -> None:
        module.layers = maker.platform.ModuleList(
            [maker.linear(rows, columns) for columns, rows in ((4, 17), (17, 5), (5, 3), (3, 2), (2, 1))]
        )

    def forward(module: Any, x: Any, rank: int) -> Any:
        for layer in module.layers:
            x = maker.platform.silu(layer(x))
        return x

    return maker.model(setup, forward)


PROGRAMS = {
    "mlp": Program(mlp, ("blocks.0", "blocks.1")),
    "tied": Program(tied, ("embed", "block"), vocabulary=5),
    "twice": Program(twice, ("block",)),
    "branches": Program(branches, ("choice",)),
    "frozen": Program(frozen, ("block", "still")),
    "scalars": Program(scalars, ("part",)),
    "uneven": Program(uneven),
}


def make_mesh(world: World, replicas: int = 1) -> DeviceMesh:
    """1-D over the world, or 2-D (replicas, shards)."""
    shape = (world.size,) if replicas == 1 else (replicas, world.size // replicas)
    return init_device_mesh(world.device_type, shape)


def loss_of(platform: Any, output: Any) -> Any:
    return platform.mean(output * output)


def reference_gradients(program: Program, maker: Maker, model: Any, num_ranks: int, step: int) -> list[Any]:
    """One process: the mean loss over what all ranks see, one backward; the outputs of the ranks."""
    platform = maker.platform
    outputs = [model(program.inputs(maker, rank, step), rank=rank) for rank in range(num_ranks)]
    total = loss_of(platform, outputs[0])
    for output in outputs[1:]:
        total = total + loss_of(platform, output)
    platform.backward([total / num_ranks])
    return outputs


def local(parameter: Any) -> Any:
    """The plain tensor that this rank holds of a parameter: its shard, or of a plain one itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sgd_step(platform: Any, model: Any) -> None:
    """``p = p - lr * grad``; parameters without a gradient stay."""
    for _, parameter in platform.named_parameters(model):
        parameter = local(parameter)
        gradient = platform.get_grad(parameter)
        if gradient is not None:
            platform.add_(parameter, gradient, alpha=-LEARNING_RATE)
            platform.set_grad(parameter, None)


def numpy_of(platform: Any, model: Any, value: Callable[[Any], Any]) -> dict[str, Any]:
    """``value(parameter)`` of every parameter, by name, on the host."""
    found = {}
    for name, parameter in platform.named_parameters(model):
        x = value(local(parameter))
        found[name] = None if x is None else platform.to_numpy(x)
    return found


def whole(
    world: World, model: Any, shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh, value: Any
) -> dict[str, Any]:
    """The same of a sharded model, put together from all ranks by an independent route."""
    platform, group = world.platform, mesh.get_group(mesh.ndim - 1)
    found = {}
    for name, parameter in platform.named_parameters(model):
        x = value(local(parameter))
        if x is not None and shapes[name]:
            sizes = chunk_sizes(shapes[name][0], group.size)
            x = platform.cat(collectives.all_gather_uneven(x, sizes, group))
        found[name] = None if x is None else platform.to_numpy(x)
    return found


def check_three_steps(world: World, program: Program, replicas: int = 1, **kwargs: Any) -> None:
    """Outputs, every gradient, and the parameters after three steps are those of one process."""
    platform = world.platform
    reference, sharded = program.build(Maker(world)), program.build(Maker(world))
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    mesh = make_mesh(world, replicas)
    program.shard(sharded, mesh, **kwargs)
    assert [n for n, _ in platform.named_parameters(sharded)] == list(shapes)
    limits = tolerance(world)
    for step in range(3):
        maker = Maker(world)
        outputs = reference_gradients(program, maker, reference, world.size, step)
        output = sharded(program.inputs(maker, world.rank, step), rank=world.rank)
        assert_parity(output, outputs[world.rank], **limits, name=f"output of step {step}")
        platform.backward([loss_of(platform, output)])
        assert_parity(
            whole(world, sharded, shapes, mesh, platform.get_grad),
            numpy_of(platform, reference, platform.get_grad),
            **limits,
            name=f"gradients of step {step}",
        )
        sgd_step(platform, reference)
        sgd_step(platform, sharded)
    assert_parity(
        whole(world, sharded, shapes, mesh, platform.detach),
        numpy_of(platform, reference, platform.detach),
        **limits,
        name="parameters after three steps",
    )
