"""A small layer, attention-like and an MLP, written once on the platform; and the check of a sharded one against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hp_dtensor import distribute_tensor
from hp_dtensor.placements import Replicate, Shard
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import Counted, World, assert_parity, count_collectives

BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 5, 3, 12, 6, 10
"""5 samples over 2 ranks are 3 and 2; 6 heads divide over 2 and 3 ranks, 10 hidden columns over 3 are 4, 4 and 2."""


def dtype_of(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def tolerance(world: World) -> dict[str, float]:
    """Numbers of the order of 1, in sums of at most 200 products: a few hundred roundings of 1e-16, or of 6e-8."""
    return {"rtol": 0.0, "atol": 1e-12 if dtype_of(world) == "float64" else 1e-4}


def make_mesh(world: World, *, grid: bool = False) -> DeviceMesh:
    """A line ``tp`` of all ranks, or a grid ``dp`` x ``tp`` of four."""
    if grid:
        return init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("tp",))


def tensor(world: World, *shape: int, seed: int = 0) -> Any:
    """The same numbers on every rank."""
    values = np.random.default_rng(seed).uniform(-1.0, 1.0, shape)
    return world.platform.tensor(np.asarray(values), dtype_of(world), world.device)


@cache
def classes(platform: Any) -> Any:
    """The modules, which derive from the framework's class."""

    class Linear(platform.Module):
        def __init__(self, world: World, rows: int, columns: int, seed: int) -> None:
            super().__init__()
            self.weight = platform.parameter(tensor(world, rows, columns, seed=seed))
            self.bias = platform.parameter(tensor(world, rows, seed=seed + 100))

        def forward(self, x: Any) -> Any:
            return platform.linear(x, self.weight, self.bias)

    class Attention(platform.Module):
        """Without the softmax: sums of values weighted by products of queries and keys."""

        def __init__(self, world: World) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (Linear(world, WIDTH, WIDTH, seed) for seed in (1, 2, 3, 4))

        def forward(self, x: Any) -> Any:
            q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
            mixed = (q @ k.transpose(-1, -2)) @ v
            return self.o(mixed.transpose(1, 2).reshape((x.shape[0], LENGTH, WIDTH)))

        def heads(self, x: Any) -> Any:
            return x.reshape((x.shape[0], LENGTH, HEADS, WIDTH // HEADS)).transpose(1, 2)

    class MLP(platform.Module):
        def __init__(self, world: World) -> None:
            super().__init__()
            self.up, self.down = Linear(world, HIDDEN, WIDTH, 5), Linear(world, WIDTH, HIDDEN, 6)

        def forward(self, x: Any, scale: Any = None) -> Any:
            hidden = platform.gelu(self.up(x))
            return self.down(hidden if scale is None else hidden * scale)

    class Layer(platform.Module):
        def __init__(self, world: World) -> None:
            super().__init__()
            self.attention, self.mlp = Attention(world), MLP(world)

        def forward(self, x: Any) -> Any:
            x = self.attention(x) * 0.125 + x
            return self.mlp(x) + x

    class Tied(platform.Module):
        """One weight at both ends."""

        def __init__(self, world: World) -> None:
            super().__init__()
            self.first, self.last = Linear(world, WIDTH, WIDTH, 7), Linear(world, WIDTH, WIDTH, 7)
            self.last.weight = self.first.weight
            platform.register_buffer(self, "table", tensor(world, WIDTH, seed=8))

        def forward(self, x: Any) -> Any:
            return self.last(platform.gelu(self.first(x)) * self.table)

    class Found:
        pass

    for made in (Linear, Attention, MLP, Layer, Tied):
        setattr(Found, made.__name__, made)
    return Found


def make(world: World, name: str = "Layer") -> Any:
    """A module of :func:`classes`, with the same parameters at every call."""
    return getattr(classes(world.platform), name)(world)


def input_of(world: World) -> Any:
    """A batch that requires grad."""
    x = tensor(world, BATCH, LENGTH, WIDTH, seed=9)
    return world.platform.set_requires_grad_(x, True)


def placed_input(world: World, mesh: Any) -> Any:
    """The batch cut along ``dp``, whole along ``tp``."""
    return distribute_tensor(
        input_of(world), mesh, [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names]
    )


def loss_of(output: Any) -> Any:
    """Not the same for all elements: a plain sum would hide gradients in the wrong places."""
    return (output * output).mean()


def unsharded(world: World, name: str = "Layer") -> tuple[Any, dict[str, Any]]:
    """Loss and gradients of the module in one process; that of the batch is called ``x``."""
    p, module, x = world.platform, make(world, name), input_of(world)
    loss = loss_of(module(x))
    p.backward([loss])
    return loss, {"x": p.get_grad(x), **{n: p.get_grad(w) for n, w in p.named_parameters(module)}}


def check(
    world: World, module: Any, x: Any, name: str = "Layer", *, call: Any = None
) -> tuple[Counted, Counted]:
    """Run the sharded module and compare with one process; the counts of forward's and backward's collectives."""
    p = world.platform
    expected, gradients = unsharded(world, name)
    with count_collectives() as forward:
        loss = loss_of((call or module)(x))
    with count_collectives() as backward:
        loss.backward() if hasattr(loss, "full_tensor") else p.backward([loss])
    assert_parity(loss, expected, **tolerance(world), name="loss")
    found = {"x": grad_of(p, x), **{n: grad_of(p, w) for n, w in p.named_parameters(module)}}
    assert set(found) == set(gradients)
    for n, gradient in found.items():
        assert_parity(gradient, gradients[n], **tolerance(world), name=f"gradient of {n}")
    return forward, backward


def grad_of(platform: Any, x: Any) -> Any:
    """The gradient of a DTensor as one, of a plain tensor as a plain one."""
    return x.grad if hasattr(x, "full_tensor") else platform.get_grad(x)
