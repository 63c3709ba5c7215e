"""Losses, steps and the comparison of a model with one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hp_dtensor import DTensor
from hp_platform.testing import World, assert_parity
from hp_tp import (
    parallelize_module,
    vocab_parallel_cross_entropy,
)

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import make_mesh, tolerance

LEARNING_RATE = 0.1


def mean_square(platform: Any, output: Any) -> Any:
    """A loss that is not the same for all elements: a plain sum would hide gradients in the wrong places."""
    return platform.mean(output * output)


def cross_entropy(platform: Any, logits: Any, targets: Any) -> Any:
    """Of logits ``(BATCH, length, vocabulary)``, whole; or DTensors whose classes are cut."""
    if isinstance(logits, DTensor):
        rows = logits.reshape((-1, logits.shape[-1]))
        return vocab_parallel_cross_entropy(rows, platform.reshape(targets, (-1,)))
    return platform.cross_entropy(
        platform.reshape(logits, (-1, logits.shape[-1])), platform.reshape(targets, (-1,))
    )


def backward(platform: Any, loss: Any) -> None:
    if isinstance(loss, DTensor):
        loss.backward()
    else:
        platform.backward([loss])


def local(parameter: Any) -> Any:
    """The plain tensor that this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sgd_step(platform: Any, model: Any) -> None:
    """``p = p - lr * grad``, and no gradients any more."""
    for _, parameter in platform.named_parameters(model):
        piece = local(parameter)
        gradient = platform.get_grad(piece)
        if gradient is not None:
            platform.add_(piece, gradient, alpha=-LEARNING_RATE)
            platform.set_grad(piece, None)


def whole_gradients(platform: Any, model: Any) -> dict[str, Any]:
    """Gradients by name, put together from all ranks."""
    found = {}
    for name, parameter in platform.named_parameters(model):
        gradient = parameter.grad if isinstance(parameter, DTensor) else platform.get_grad(parameter)
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def whole_parameters(platform: Any, model: Any) -> dict[str, Any]:
    """Parameters by name, put together from all ranks."""
    return {
        name: platform.detach(p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in platform.named_parameters(model)
    }


def check_steps(
    world: World,
    build: Callable[[], Any],
    plan: Mapping[str, Any],
    loss_of: Callable[[Any, int], Any],
    *,
    reference_loss_of: Callable[[Any, int], Any] | None = None,
    steps: int = 3,
) -> Any:
    """Losses, every gradient, and the parameters after some steps are those of one process. Returns the parallel model.

    ``loss_of(model, step)`` runs a model; ``reference_loss_of`` is the same for one process where that reads otherwise.
    """
    platform, limits = world.platform, tolerance(world)
    reference, model = build(), parallelize_module(build(), make_mesh(world), plan)
    for step in range(steps):
        expected = (reference_loss_of or loss_of)(reference, step)
        found = loss_of(model, step)
        assert_parity(found, expected, **limits, name=f"loss of step {step}")
        backward(platform, expected)
        backward(platform, found)
        assert_parity(
            whole_gradients(platform, model),
            whole_gradients(platform, reference),
            **limits,
            name=f"gradients of step {step}",
        )
        sgd_step(platform, reference)
        sgd_step(platform, model)
    assert_parity(
        whole_parameters(platform, model),
        whole_parameters(platform, reference),
        **limits,
        name="parameters after the steps",
    )
    return model
