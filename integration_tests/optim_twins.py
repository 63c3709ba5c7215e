"""A model that fully_shard has cut, with an optimizer of its shards and one of whole tensors that are given the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor import DTensor
from hp_fsdp import fully_shard
from hp_optim import AdamW
from hp_platform import init_device_mesh
from hp_platform.testing import World

WIDTHS = ((4, 17), (17, 5), (5, 3), (3, 2))
"""Of the layers of a unit: 2 to 17 rows, some of them fewer than ranks."""
ROWS = 3


def widest(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def make_model(world: World, dtype: str, seed: int = 7) -> Any:
    """A stack of two units, in one of which a layer is used only if it is asked for, and a scalar at the root."""
    platform, random = world.platform, np.random.default_rng(seed)

    def parameter(*shape: int) -> Any:
        value = np.asarray(random.uniform(-0.5, 0.5, shape))
        return platform.parameter(platform.tensor(value, dtype, world.device))

    class Layer(platform.Module):
        def __init__(self, columns: int, rows: int) -> None:
            super().__init__()
            self.weight = parameter(rows, columns)
            self.bias = parameter(rows)

        def forward(self, x: Any) -> Any:
            return platform.silu(platform.linear(x, self.weight, self.bias))

    class Stack(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = platform.ModuleList([Layer(*widths) for widths in WIDTHS])
            self.extra = Layer(2, 2)

        def forward(self, x: Any, uses_extra: bool = True) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.extra(x) if uses_extra else x

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Stack()
            self.between = Layer(2, 4)
            self.second = Stack()
            self.scale = parameter()

        def forward(self, x: Any, uses_extra: bool = True) -> Any:
            x = self.second(self.between(self.first(x, uses_extra)), uses_extra)
            return x * self.scale

    return Model()


class Shadow:
    """A sharded model, and plain whole tensors that are given the same gradients: an optimizer of each."""

    def __init__(
        self,
        world: World,
        mesh: Any,
        *,
        dtype: str | None = None,
        options: Any = None,
        kind: Any = AdamW,
        seed: int = 7,
        **how: Any,
    ) -> None:
        self.world, self.platform, self.dtype = world, world.platform, dtype or widest(world)
        # Offloaded shards are updated on the host, whose bits a device's need not be.
        self.home = "cpu" if "offload_policy" in how else world.device
        self.model = make_model(world, self.dtype, seed)
        fully_shard(self.model.first, mesh, **how)
        fully_shard(self.model.second, mesh, **how)
        fully_shard(self.model, mesh, **how)
        self.parameters = dict(self.platform.named_parameters(self.model))
        self.wholes = {
            name: self.platform.parameter(self.platform.clone(self.whole(p)))
            for name, p in self.parameters.items()
        }
        settings = {"lr": 0.05, "weight_decay": 0.1, "fused": False, **(options or {})}
        self.optimizer = kind(self.platform.named_parameters(self.model), **settings)
        for key in ("divide_replicas", "offload_state", "offload_bucket"):
            settings.pop(key, None)
        self.shadow = AdamW(list(self.wholes.values()), **settings)

    def whole(self, x: Any) -> Any:
        x = x.detach().full_tensor() if isinstance(x, DTensor) else self.platform.detach(x)
        return self.platform.to_device(x, self.home)

    def loss(self, step: int, **kwargs: Any) -> Any:
        random = np.random.default_rng(100 * step + self.world.rank)
        x = self.platform.tensor(random.uniform(-1, 1, (ROWS, 4)), self.dtype, self.world.device)
        output = self.model(x, **kwargs)
        return self.platform.mean(output * output)

    def backward(self, step: int, **kwargs: Any) -> None:
        self.platform.backward([self.loss(step, **kwargs)])

    def update(self) -> None:
        """Both, from the gradients of the sharded model."""
        platform = self.platform
        for name, parameter in self.parameters.items():
            wide = getattr(parameter, "main_grad", None)
            found = parameter.grad if wide is None else wide
            whole = None if found is None else platform.clone(self.whole(found))
            if wide is not None:
                self.wholes[name].main_grad = whole
            else:
                platform.set_grad(self.wholes[name], whole)
        self.optimizer.step()
        self.shadow.step()
        self.optimizer.zero_grad()
        self.shadow.zero_grad()

    def check(self) -> None:
        """Parameters and state, bit for bit: an element's numbers depend on nothing beside it."""
        platform = self.platform
        for name, parameter in self.parameters.items():
            other = self.wholes[name]
            self.equal(parameter, other)
            mine, theirs = self.optimizer.state.get(parameter) or {}, self.shadow.state.get(other) or {}
            assert list(mine) == list(theirs), name
            for key, value in mine.items():
                if platform.is_tensor(value):
                    self.equal(value, theirs[key])
                else:
                    assert value == theirs[key]

    def equal(self, a: Any, b: Any) -> None:
        np.testing.assert_array_equal(
            self.platform.to_bits(self.whole(a)), self.platform.to_bits(self.whole(b))
        )

    def flat_rows(self) -> int:
        """How many rows there are: state lies as far from its shard as that of the other parameters of a row."""
        data_ptr, distances = self.platform.data_ptr, set()
        for parameter in self.parameters.values():
            shard = parameter.to_local()
            if int(np.prod(tuple(shard.shape))):
                entry = self.optimizer.state[parameter]
                distances.add(data_ptr(entry["exp_avg"].to_local()) - data_ptr(shard))
        return len(distances)


def mesh_of(world: World, replicas: int) -> Any:
    shape = (world.size,) if replicas == 0 else (replicas, world.size // replicas)
    return init_device_mesh(world.device_type, shape)


def replica_counts(world: World) -> list[int]:
    """0: a mesh of one dim."""
    return [0] + [n for n in range(2, world.size + 1) if world.size % n == 0]
