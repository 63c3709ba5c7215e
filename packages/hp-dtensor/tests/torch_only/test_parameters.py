"""DTensors as parameters of torch's modules: gradients, devices and dtypes, memory."""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hp_dtensor
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_modules import linear_of, loss_of, parameter_of
from placed_tensors import TOLERANCE, TORCH, make_mesh, whole_of


@distributed(2, backends=TORCH)
def test_a_parameter_is_both_a_parameter_and_a_dtensor(world: World) -> None:
    p = parameter_of(world, 3, 5)
    assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and isinstance(p, torch.Tensor)
    assert p.requires_grad and p.is_leaf and p.grad is None
    assert (p.stride(), p.stride(0), p.size(1), len(p), p.ndim, p.local_shape[1]) == ((5, 1), 5, 5, 3, 2, 5)
    assert p.t().stride() == (1, 5)
    assert p.contiguous() is p and p.to(torch.float64) is p and p.to(world.device) is p and p.double() is p
    assert len({p, p}) == 1 and not p.is_partial() and not p.is_meta
    assert repr(p) == str(p) == f"{p}" and "shape=(3, 5)" in repr(p) and "Shard(0)" in repr(p)
    assert repr(p).endswith("requires_grad=True)") and "mesh=DeviceMesh" in repr(p)
    p.note = 1
    assert p.note == 1


@distributed(2, backends=TORCH)
def test_a_gradient_is_one_dtensor_and_zero_grad_clears_it_both_ways(world: World) -> None:
    module = linear_of(world)
    loss_of(module, world).backward()
    grad = module.weight.grad
    assert isinstance(grad, DTensor) and grad is module.weight.grad and grad.placements == (Shard(0),)
    module.zero_grad(set_to_none=False)
    assert module.weight.grad is grad and not grad.to_local().any()
    module.zero_grad()
    assert module.weight.grad is None
    module.weight.grad = grad
    del module.weight.grad
    with pytest.raises(ValueError, match="gradient must be a DTensor of"):
        module.weight.grad = torch.zeros(3, 5, dtype=torch.float64, device=world.device)


@pytest.mark.parametrize("swap", [False, True])
@distributed(2, backends=TORCH)
def test_a_module_moves_between_dtypes_and_devices(world: World, swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module = linear_of(world)
        loss_of(module, world).backward()
        weight, values = module.weight, module.weight.full_tensor().detach()
        module.to(torch.float32)
        assert module.weight is weight and weight.dtype == weight.grad.dtype == torch.float32
        assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.shape == (3, 5)
        assert next(iter(torch._C._group_tensors_by_device_and_dtype([[weight]], False)))[1] == torch.float32
        assert_parity(weight, values.float(), exact=True)
        loss_of(module.double(), world).backward()
        module.zero_grad()
        module.to("meta")
        assert module.weight.device.type == module.weight.to_local().device.type == "meta"
        assert isinstance(module.weight, DTensor)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@distributed(2, backends=TORCH)
def test_data_is_read_and_replaced_under_the_same_object(world: World) -> None:
    p = parameter_of(world, 3, 5, at=Replicate())
    x = distribute_tensor(whole_of(world, 4, 5), make_mesh(world), [Shard(0)])
    F.linear(x, p)
    assert p._marks.by_dims
    assert isinstance(p.data, DTensor) and not p.data.requires_grad
    other = distribute_tensor(whole_of(world, 4, 5), make_mesh(world), [Replicate()])
    p.data = other
    assert p.shape == (4, 5) and p.requires_grad and isinstance(p, nn.Parameter)
    F.linear(x, p).square().sum().backward()
    w = whole_of(world, 4, 5).requires_grad_()
    F.linear(whole_of(world, 4, 5), w).square().sum().backward()
    assert_parity(p.grad, w.grad, rtol=TOLERANCE, atol=TOLERANCE)
    p.data = other.float()
    assert p.dtype == torch.float32
    with pytest.raises(ValueError, match="data of a DTensor must be a DTensor"):
        p.data = torch.zeros(4, 5, device=world.device)


@distributed(2, backends=TORCH)
def test_parameters_are_swapped_also_after_backward(world: World) -> None:
    first, second = parameter_of(world, 4, 5, at=Replicate()), parameter_of(world, 4, 5, at=Shard(1))
    F.linear(distribute_tensor(whole_of(world, 2, 5), make_mesh(world), [Shard(0)]), first).sum().backward()
    mine, theirs = first.to_local(), second.to_local()
    torch.utils.swap_tensors(first, second)
    assert first.to_local() is theirs and second.to_local() is mine
    assert (first.placements, second.placements) == ((Shard(1),), (Replicate(),))
    # T8: as of any tensor of torch.
    known = weakref.ref(first)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(first, second)
    assert known() is first


@distributed(2, backends=TORCH)
def test_what_nobody_holds_is_freed_at_once(world: World) -> None:
    mesh = make_mesh(world)

    def locals_after(use: Callable[[Any, Any], Any]) -> int:
        w = distribute_tensor(whole_of(world, 4, 5), mesh, [Replicate()]).requires_grad_()
        x = distribute_tensor(whole_of(world, 4, 5), mesh, [Shard(0)])
        known = [weakref.ref(w), weakref.ref(w.to_local())]
        use(x, w)
        del w, x
        return sum(one() is not None for one in known)

    gc.disable()
    try:
        assert locals_after(F.linear) == 0
        assert locals_after(lambda x, w: F.linear(x, w).sum().backward()) == 0
    finally:
        gc.enable()


@distributed(2, backends=TORCH)
def test_modules_of_torch_carry_dtensors(world: World) -> None:
    p = parameter_of(world, 3, 5)
    x = distribute_tensor(whole_of(world, 4, 5), make_mesh(world), [Replicate()])
    assert nn.ParameterList([p])[0] is p
    out = torch.func.functional_call(nn.Linear(5, 3, bias=False), {"weight": p}, (x,))
    assert_parity(out, whole_of(world, 4, 5) @ whole_of(world, 3, 5).T, rtol=TOLERANCE, atol=TOLERANCE)

    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

        def right_inverse(self, x: Any) -> Any:
            return x * 0.5

    module = linear_of(world)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    module(x).sum().backward()
    original = module.parametrizations.weight.original
    assert isinstance(original, DTensor) and isinstance(original.grad, DTensor)
    assert_parity(module.weight, whole_of(world, 3, 5), exact=True)
    buffered = nn.Module()
    buffered.register_buffer("b", distribute_tensor(whole_of(world, 4), make_mesh(world), [Shard(0)]))
    assert isinstance(buffered.float().b, DTensor) and buffered.b.dtype == torch.float32


@distributed(2, backends=TORCH)
def test_a_layout_says_mesh_and_placements(world: World) -> None:
    layout = hp_dtensor.Layout((2,), ("x",))("x", "None")
    with count_collectives() as counted:
        x = DTensor.from_local_with_layout(whole_of(world, 2, 3), layout)
    counted.assert_counts()
    assert x.shape == (4, 3) and x.placements == (Shard(0),) and x.layout is layout
