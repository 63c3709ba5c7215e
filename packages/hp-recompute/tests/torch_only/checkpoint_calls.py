"""A function to be checkpointed, the ways to do so, and how its numbers are compared with those of the plain call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hp_recompute import checkpoint

Run = Callable[..., Any]
WEIGHT = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"early_stop": False},
    {"policy_fn": [torch.matmul]},
    {"policy_fn": lambda context, operation, *args, **kwargs: True},
    {"policy_fn": [torch.matmul], "early_stop": False},
    {"determinism_check": "operations"},
    {"policy_fn": [torch.matmul], "early_stop": False, "determinism_check": "operations"},
]


def assert_same(
    program: Callable[[Run, torch.Tensor, torch.Tensor], torch.Tensor],
    options: list[dict[str, Any]] = OPTIONS,
) -> None:
    """``program(run, x, w)``, which goes backward itself, gives the same bits with plain calls and with checkpoints."""

    def result(run: Run) -> list[Any]:
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
        w = WEIGHT.clone().requires_grad_()
        y = program(run, x, w)
        return [y.detach(), x.grad, w.grad, torch.rand(1)]

    expected = result(lambda function, *args, **kwargs: function(*args, **kwargs))
    for each in options:
        found = result(partial(checkpoint, **each))
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.equal(one, other), each


def inner(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ w).cos()
