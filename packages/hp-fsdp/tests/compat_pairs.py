"""A model whose parameters another has laid out, and the same in one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_fsdp import fully_shard
from hp_fsdp.unit import units_in
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity

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
