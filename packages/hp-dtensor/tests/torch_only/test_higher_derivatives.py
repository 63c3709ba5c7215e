"""Derivatives of derivatives where pieces are empty, hold one element or zeros: values, and that all ranks meet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed


def _embedded(x: Any, w: Any) -> Any:
    places = torch.tensor([0, 1, 1], device=x.device)
    return functional.embedding(places, x.cumsum(0) ** 2) ** 2


def _into(x: Any, w: Any) -> Any:
    return (x.cumsum(0) ** 2).mul_(x.cumsum(0))


def _normed(x: Any, w: Any) -> Any:
    y = x.cumsum(0) ** 2
    if isinstance(x, DTensor):
        return functional.batch_norm(y, None, None, None, None, True) ** 3
    # Written out: the third derivative of torch's own batch norm is not that of its formula.
    return ((y - y.mean(0)) / (y.var(0, correction=0) + 1e-5).sqrt()) ** 3


# Behind each of them lies a running sum, whose backward communicates.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "cumprod": lambda x, w: (x.cumsum(0) ** 2).cumprod(0),
    "cumsum": lambda x, w: (x.cumsum(0) ** 2).cumsum(0) * x,
    "cummax": lambda x, w: (x.cumsum(0) ** 2).cummax(0)[0] ** 2,
    "mul": lambda x, w: (x.cumsum(0) * (x * w[:1])) ** 2,
    "in place": _into,
    "softmax": lambda x, w: (x.cumsum(0) ** 2).softmax(0) * x.cumsum(0),
    "layer_norm": lambda x, w: functional.layer_norm(x.cumsum(0), (3,), w.sum(0)) ** 2,
    "batch_norm": _normed,
    "products": lambda x, w: (x.cumsum(0).t() @ x.cumsum(0) ** 2 @ w) ** 2,
    "rows of a product": lambda x, w: ((x @ w).cumsum(0) ** 2 @ w) ** 2,
    "embedding": _embedded,
    "sum": lambda x, w: ((x.cumsum(0) ** 2).sum(0) ** 2) * w,
    "mean": lambda x, w: (x.cumsum(0) ** 2).mean(0) ** 2 * w,
    "var": lambda x, w: (x.cumsum(0) ** 2).var(0) ** 2 * w,
    "norm": lambda x, w: (x.cumsum(0) ** 2).norm(dim=0) ** 2 * w,
    "amax": lambda x, w: ((x.cumsum(0) ** 2).amax(0) ** 2) * w,
    "prod": lambda x, w: ((x.cumsum(0) ** 2).prod(0) ** 2) * w,
    "prod of zeros": lambda x, w: ((x.cumsum(0) ** 2) * (x * 0)).prod(0) * w,
    "view": lambda x, w: (x.cumsum(0) ** 2).reshape(-1).cumprod(0),
    "cat": lambda x, w: torch.cat([x.cumsum(0) ** 2, w * w]) ** 2,
    "where": lambda x, w: torch.where(x > 0, x.cumsum(0) ** 2, w[:1]) ** 2,
}


def _gradients(program: Any, x: Any, w: Any) -> list[Any]:
    """Of the program's squares, of the squares of these, and of the squares of those."""
    given = program(x, w) * 1.5
    found: list[Any] = []
    loss: Any = (given * given).sum()
    for order in range(3):
        grads = torch.autograd.grad(loss, [x, w], create_graph=order < 2, materialize_grads=True)
        found.extend(grads)
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        loss = sum((g * g).sum() for g in whole)
    return found


@pytest.mark.parametrize("rows", [1, 4])
# Not on npu: its collectives have no float64, and third derivatives in float32 prove little.
@distributed(world_size=(2, 3), backends=("torch", "cuda"))
def test_three_orders_of_derivatives_where_ranks_hold_other_numbers_of_rows(rows: int, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    numbers = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 3, generator=numbers, dtype=torch.float64) + 0.3
    w = torch.rand(3, 3, generator=numbers, dtype=torch.float64) + 0.2
    x, w = x.to(world.device), w.to(world.device)
    for name, program in PROGRAMS.items():
        if rows < 3 and name in ("var", "batch_norm", "embedding"):
            continue  # not defined for one row
        expected = _gradients(program, x.clone().requires_grad_(), w.clone().requires_grad_())
        for x_at, w_at in ((Shard(0), Replicate()), (Replicate(), Shard(1))):
            if name == "batch_norm" and x_at == Replicate():
                continue  # torch's own, see above
            dx, dw = (distribute_tensor(t, mesh, [at]).requires_grad_() for t, at in ((x, x_at), (w, w_at)))
            for i, (actual, wanted) in enumerate(zip(_gradients(program, dx, dw), expected, strict=True)):
                what = f"{name} at {x_at}, {w_at}: gradient of {'xw'[i % 2]}, order {i // 2 + 1}"
                assert_parity(actual, wanted, rtol=1e-9, atol=1e-9, name=what)
