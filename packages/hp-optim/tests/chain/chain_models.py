"""A small model with every kind of parameter that a routing tells apart, and an optimizer that shows what it has done."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor import DTensor, Shard, distribute_module, distribute_tensor
from hp_optim.base import OptimizerSteps, gradient_of
from hp_optim.make_class import make_optimizer_class
from hp_optim.pieces import like, local_of
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World

VOCABULARY, WIDTH, HIDDEN, EXPERTS = 7, 4, 6, 3


def dtype_of(world: World) -> str:
    """The widest dtype in which the device computes."""
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def make_model(world: World, *, tied: bool = False) -> Any:
    """Embedding, two layers (norm, in, experts, out), norm, head. Equal at every call and on every rank."""
    platform, random = world.platform, np.random.default_rng(5)

    def parameter(*shape: int) -> Any:
        values = np.asarray(random.uniform(-0.5, 0.5, shape))
        return platform.parameter(platform.tensor(values, dtype_of(world), world.device))

    class Part(platform.Module):  # type: ignore[name-defined, misc]
        def __init__(module, **parts: Any) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(module, name, part)

    def layer() -> Any:
        return Part(
            norm=Part(weight=parameter(WIDTH)),
            up=Part(weight=parameter(HIDDEN, WIDTH), bias=parameter(HIDDEN)),
            experts=parameter(EXPERTS, HIDDEN, WIDTH),
            output=Part(weight=parameter(WIDTH, HIDDEN)),
        )

    model = Part(
        embed_tokens=Part(weight=parameter(VOCABULARY, WIDTH)),
        layers=platform.ModuleList([layer(), layer()]),
        norm=Part(weight=parameter(WIDTH)),
        lm_head=Part(weight=parameter(VOCABULARY, WIDTH)),
        scale=parameter(),
    )
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def shard(world: World, model: Any, mesh: Any = None) -> Any:
    """Every parameter cut along its first dim over all ranks; vectors of the norms and scalars replicated."""
    mesh = mesh or init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))
    platform = world.platform

    def cut(name: str, module: Any, mesh: Any) -> None:
        for own, value in list(platform.named_parameters(module, recurse=False)):
            if value.ndim > 1:
                whole = distribute_tensor(platform.detach(value), mesh, [Shard(0)])
                platform.set_parameter(module, own, platform.parameter(whole))

    return distribute_module(model, mesh, cut)


def parameters(world: World, model: Any) -> dict[str, Any]:
    return dict(world.platform.named_parameters(model))


def give_gradients(world: World, model: Any, step: int, without: tuple[str, ...] = ()) -> None:
    """To every parameter the piece of a gradient that depends on its name's place and the step alone."""
    platform = world.platform
    for place, (name, parameter) in enumerate(platform.named_parameters(model)):
        if name in without:
            continue
        random = np.random.default_rng(1000 * step + place)
        whole = platform.tensor(
            np.asarray(random.uniform(-1, 1, tuple(parameter.shape))), dtype_of(world), world.device
        )
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        else:
            platform.set_grad(parameter, whole)


class MomentumSteps(OptimizerSteps):
    """``v = momentum v + g; p = p - lr v``, state as the parameter lies."""

    HYPERPARAMETERS = frozenset({"lr", "momentum"})

    def __init__(self, params: Any, lr: Any = 0.5, momentum: float = 0.5, **unknown: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum}, unknown)

    def _make_state(self, parameter: Any) -> None:
        local = local_of(parameter)
        zeros = self.platform.zeros_like(self.platform.detach(local))
        self.state[parameter] = {"velocity": like(parameter, zeros)}

    def _update(self) -> None:
        platform = self.platform
        for group in self.param_groups:
            group["step"] = group["step"] + 1
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is None:
                    continue
                if not self.state.get(parameter):
                    self._make_state(parameter)
                velocity = local_of(self.state[parameter]["velocity"])
                platform.mul_(velocity, group["momentum"])
                platform.add_(velocity, local_of(gradient))
                platform.add_(local_of(parameter), velocity, -group["lr"])


def momentum(params: Any, **kwargs: Any) -> Any:
    return make_optimizer_class("Momentum", MomentumSteps)(params, **kwargs)


def is_matrix(parameter: Any) -> bool:
    return parameter.ndim > 1


def two(world: World, model: Any, **kwargs: Any) -> dict[str, Any]:
    """Two optimizers: of everything but matrices, and of matrices."""
    named = parameters(world, model)
    return {
        "rest": momentum([p for p in named.values() if not is_matrix(p)], lr=0.25, **kwargs),
        "matrices": momentum([p for p in named.values() if is_matrix(p)], momentum=0.75, **kwargs),
    }


def snapshot(chain: Any) -> list[Any]:
    """All that reading may not change: objects, memory, values, settings, gradients."""
    platform = get_platform()

    def seen(x: Any) -> Any:
        if not platform.is_tensor(x):
            return x
        local = platform.detach(local_of(x))
        return (
            id(x),
            platform.data_ptr(local),
            platform.to_numpy(local).tobytes(),
            platform.device_of(local),
        )

    return [
        [
            id(optimizer),
            {
                id(p): {key: seen(value) for key, value in entry.items()}
                for p, entry in optimizer.state.items()
            },
            [
                {key: seen(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
            [seen(p) for group in optimizer.param_groups for p in group["params"]],
            [seen(gradient_of(p)) for group in optimizer.param_groups for p in group["params"]],
        ]
        for optimizer in chain
    ]


def train(world: World, chain: Any, step: int, without: tuple[str, ...] = ()) -> None:
    """A step with gradients of its own."""
    give_gradients(world, chain.model, step, without)
    chain.step()
    chain.zero_grad()
