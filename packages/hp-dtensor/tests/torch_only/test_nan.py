"""NaN on any rank: extremes, norms and clipping give what the unsharded program gives, gradients included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

TORCH = ("torch", "cuda")
NAN, INF = float("nan"), float("inf")
CALLS: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(),
    "amin along the cut": lambda x: x.amin(0),
    "amax along the other dim": lambda x: x.amax(1, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max along the cut": lambda x: x.max(0)[0],
    "place of the smallest": lambda x: x.argmin(0),
    "aminmax": lambda x: sum(torch.aminmax(x)),
    "aminmax along the cut": lambda x: sum(torch.aminmax(x, dim=0)),
    "norm inf": lambda x: torch.linalg.vector_norm(x, INF),
    "norm -inf along the cut": lambda x: torch.linalg.vector_norm(x, -INF, 0),
    "norm inf by its method": lambda x: x.norm(INF),
    "norm 2": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp(0),
}  # fmt: skip


def _placements(mesh: DeviceMesh) -> list[Any]:
    return [Shard(0)] * len(mesh.shape)


def _told(x: torch.Tensor) -> torch.Tensor:
    """With a number for NaN, which equals nothing."""
    return x.nan_to_num(nan=1e6, posinf=1e5, neginf=-1e5)


def _same(found: Any, expected: torch.Tensor, label: str) -> None:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    assert_parity(_told(found), _told(expected), rtol=1e-12, atol=1e-12, name=label)


def _compare(name: str, call: Callable[[Any], Any], values: torch.Tensor, mesh: DeviceMesh) -> None:
    plain = values.clone().requires_grad_()
    x = distribute_tensor(values.clone(), mesh, _placements(mesh)).requires_grad_()
    whole, found = call(plain), call(x)
    _same(found, whole, name)
    if not whole.requires_grad:
        return
    try:
        whole.sum().backward()
    except RuntimeError as error:
        # torch 2.11 has no derivative of aminmax.
        assert "derivative for" in str(error), error
        return
    found.sum().backward()
    assert plain.grad is not None
    _same(x.grad, plain.grad, f"gradient of {name}")


@distributed([2, 4], backends=TORCH)
def test_nan_on_any_rank_is_the_extreme_with_the_gradient_of_one_device(world: World) -> None:
    shape = (world.size,) if world.size == 2 else (2, 2)
    mesh = init_device_mesh(world.device_type, shape)
    for rows in (5, 2):  # of 2 rows the last of 4 ranks have none
        numbers = torch.arange(rows * 2, dtype=torch.float64, device=world.device).reshape(rows, 2)
        for at in ((0,), (rows - 1,), (0, rows - 1)):
            values = numbers - 3
            for row in at:
                values[row, 0] = NAN
            for name, call in CALLS.items():
                _compare(f"{name}, {rows} rows, NaN at {at}", call, values, mesh)


@distributed(2, backends=TORCH)
def test_nan_of_one_rank_is_in_a_partial_maximum(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("max", "min"):
            for holder in (0, 1):
                local = torch.full((3, 2), float(world.rank), dtype=dtype, device=world.device)
                if world.rank == holder:
                    local[1, 0] = NAN
                for target in (Replicate(), Shard(0)):
                    leaf = local.clone().requires_grad_()
                    x = DTensor.from_local(leaf, mesh, [Partial(kind)])
                    found = x.redistribute(placements=[target])
                    expected = torch.full_like(local, 1.0 if kind == "max" else 0.0)
                    expected[1, 0] = NAN
                    _same(found.detach(), expected, f"{kind} of {dtype}")
                    found.sum().backward()
                    wins = torch.full_like(local, float(world.rank == (kind == "max")))
                    wins[1, 0] = float(world.rank == holder)
                    assert_parity(leaf.grad, wins, exact=True, name=f"gradient of {kind} of {dtype}")


@distributed(2, backends=TORCH)
def test_clipping_by_the_largest_gradient_sees_nan_of_any_rank(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for holder in range(4):
        for order in (INF, 2.0):
            grad = torch.arange(4.0, dtype=torch.float64, device=world.device) + 1
            grad[holder] = NAN
            plain = torch.nn.Parameter(torch.zeros_like(grad))
            plain.grad = grad.clone()
            cut = torch.nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, [Shard(0)]))
            cut.grad = distribute_tensor(grad, mesh, [Shard(0)])
            for p in (plain, cut):
                with pytest.raises(RuntimeError, match="non-finite"):
                    torch.nn.utils.clip_grad_norm_([p], 1.0, order, error_if_nonfinite=True)
            whole = torch.nn.utils.clip_grad_norm_([plain], 1.0, order)
            found = torch.nn.utils.clip_grad_norm_([cut], 1.0, order)
            _same(found, whole, f"norm {order}, NaN at {holder}")
            _same(cut.grad, plain.grad, f"clipped by {order}, NaN at {holder}")
            assert plain.grad.isnan().all()
