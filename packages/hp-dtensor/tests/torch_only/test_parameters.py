"""DTensors as parameters of torch's modules: data, copies, files, hooks, and what torch.autograd does with them."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hp_dtensor
from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
# Elementwise functions and single products, in float64.
TOLERANCE = 1e-12
ROWS = Shard(0)


def _mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


def _whole(world: World, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(world.device)


def _parameter(world: World, *shape: int, at: Placement = ROWS) -> Any:
    return nn.Parameter(distribute_tensor(_whole(world, *shape), _mesh(world), [at]))


def _module(world: World) -> Any:
    module = nn.Linear(5, 3, dtype=torch.float64, device=world.device)
    module.weight, module.bias = _parameter(world, 3, 5), _parameter(world, 3, at=Replicate())
    return module


def _loss(module: Any, world: World) -> Any:
    return module(distribute_tensor(_whole(world, 7, 5), _mesh(world))).square().sum()


@distributed(2, backends=TORCH)
def test_a_parameter_is_both_a_parameter_and_a_dtensor(world: World) -> None:
    p = _parameter(world, 3, 5)
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
    module = _module(world)
    _loss(module, world).backward()
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
        module = _module(world)
        _loss(module, world).backward()
        weight, values = module.weight, module.weight.full_tensor().detach()
        module.to(torch.float32)
        assert module.weight is weight and weight.dtype == weight.grad.dtype == torch.float32
        assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.shape == (3, 5)
        assert next(iter(torch._C._group_tensors_by_device_and_dtype([[weight]], False)))[1] == torch.float32
        assert_parity(weight, values.float(), exact=True)
        _loss(module.double(), world).backward()
        module.zero_grad()
        module.to("meta")
        assert module.weight.device.type == module.weight.to_local().device.type == "meta"
        assert isinstance(module.weight, DTensor)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@distributed(2, backends=TORCH)
def test_data_is_read_and_replaced_under_the_same_object(world: World) -> None:
    p = _parameter(world, 3, 5, at=Replicate())
    x = distribute_tensor(_whole(world, 4, 5), _mesh(world), [Shard(0)])
    F.linear(x, p)
    assert p._marks.by_dims
    assert isinstance(p.data, DTensor) and not p.data.requires_grad
    other = distribute_tensor(_whole(world, 4, 5), _mesh(world), [Replicate()])
    p.data = other
    assert p.shape == (4, 5) and p.requires_grad and isinstance(p, nn.Parameter)
    F.linear(x, p).square().sum().backward()
    w = _whole(world, 4, 5).requires_grad_()
    F.linear(_whole(world, 4, 5), w).square().sum().backward()
    assert_parity(p.grad, w.grad, rtol=TOLERANCE, atol=TOLERANCE)
    p.data = other.float()
    assert p.dtype == torch.float32
    with pytest.raises(ValueError, match="data of a DTensor must be a DTensor"):
        p.data = torch.zeros(4, 5, device=world.device)


@distributed(2, backends=TORCH)
def test_parameters_are_swapped_also_after_backward(world: World) -> None:
    first, second = _parameter(world, 4, 5, at=Replicate()), _parameter(world, 4, 5, at=Shard(1))
    F.linear(distribute_tensor(_whole(world, 2, 5), _mesh(world), [Shard(0)]), first).sum().backward()
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
def test_state_dicts_of_dtensors_and_of_plain_tensors_load(world: World) -> None:
    module, other = _module(world), _module(world)
    state = module.state_dict()
    assert all(isinstance(v, DTensor) and not v.requires_grad for v in state.values())
    with torch.no_grad():
        other.weight.zero_()
    weight = other.weight
    other.load_state_dict(state)
    assert other.weight is weight
    assert_parity(other.weight, _whole(world, 3, 5), exact=True)
    # T10: the whole model's checkpoint: every rank takes its piece.
    plain = {"weight": _whole(world, 3, 5) * 2, "bias": _whole(world, 3) * 2}
    with count_collectives() as counted:
        other.load_state_dict(plain)
    counted.assert_counts()
    assert_parity(other.weight, plain["weight"], exact=True)
    assert_parity(other.bias, plain["bias"], exact=True)
    other.load_state_dict(state, assign=True)
    assert isinstance(other.weight, nn.Parameter) and isinstance(other.weight, DTensor)
    with pytest.raises(ValueError, match="would write DTensors into a plain tensor"):
        plain["weight"].copy_(module.weight.detach())
    with pytest.raises(ValueError, match="requires grad, beside a DTensor: say how it lies"):
        module.weight.detach().copy_(_whole(world, 3, 5).requires_grad_())


@pytest.mark.parametrize("at", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@distributed(2, backends=TORCH)
def test_values_are_written_as_the_target_lies(world: World, at: Placement) -> None:
    mesh, whole = _mesh(world), _whole(world, 3, 5)
    x = distribute_tensor(torch.zeros_like(whole), mesh, [at])
    local = x.to_local()
    for source in (
        whole,
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Partial()]),
    ):
        assert x.zero_() is x and not x.full_tensor().any()
        assert x.copy_(source) is x and x.placements == (at,) and x.to_local() is local
        assert_parity(x.full_tensor(), whole, rtol=TOLERANCE)
    x.fill_(2.5)
    assert_parity(x.full_tensor(), torch.full_like(whole, 2.5), exact=True)
    x.copy_(whole[0].float())  # broadcast, and cast
    assert_parity(x.full_tensor(), whole[:1].float().double().expand(3, 5), rtol=TOLERANCE)
    assert x.new_zeros(2, 3).placements == x.new_ones((2, 3)).placements == (Replicate(),)
    assert_parity(
        x.new_ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64, device=world.device), exact=True
    )
    assert x.reduce_partial().placements == (Replicate() if at.is_partial() else at,)
    if at.is_partial():
        with pytest.raises(ValueError, match="call reduce_partial"):
            x.type_as(whole.float())
    else:
        assert x.type_as(whole.float()).dtype == torch.float32 and x.type_as(whole) is x


@distributed(2, backends=TORCH)
def test_copies_own_their_memory_or_share_it_as_torchs_do(world: World) -> None:
    module = _module(world)
    _loss(module, world).backward()
    module.weight.note = [1]
    deep = copy.deepcopy(module)
    assert isinstance(deep.weight, nn.Parameter) and deep.weight.requires_grad and deep.weight.note == [1]
    assert deep.weight._spec is module.weight._spec
    assert deep.weight.to_local().data_ptr() != module.weight.to_local().data_ptr()
    assert_parity(deep.weight.grad, module.weight.grad.full_tensor(), exact=True)
    flat = copy.copy(module.weight)
    assert (
        isinstance(flat, nn.Parameter) and flat.to_local().data_ptr() == module.weight.to_local().data_ptr()
    )
    with pytest.raises(RuntimeError, match="made by an operation"):
        copy.deepcopy(module.weight * 2)


@distributed(2, backends=TORCH)
def test_pickles_and_files_hold_the_piece_only(world: World) -> None:
    big = torch.zeros(1000, 5, dtype=torch.float64, device=world.device)
    p = nn.Parameter(DTensor.from_local(big[: 2 - world.rank], _mesh(world), [Shard(0)], shape=(3, 5)))
    again = pickle.loads(pickle.dumps(p))
    assert isinstance(again, nn.Parameter) and again._spec is p._spec and again.requires_grad
    assert torch.equal(again.to_local(), p.to_local())
    file = io.BytesIO()
    torch.save({"p": p}, file)
    assert file.tell() < 5000
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="rebuild_dtensor"):
        torch.load(file)
    with torch.serialization.safe_globals([hp_dtensor.rebuild_dtensor]):
        file.seek(0)
        loaded = torch.load(file)["p"]
        file.seek(0)
        on_meta = torch.load(file, map_location="meta")["p"]
    assert isinstance(loaded, nn.Parameter) and loaded._spec is p._spec
    assert isinstance(on_meta, DTensor) and on_meta.device.type == "meta"


@distributed(2, backends=TORCH)
def test_hooks_see_the_whole_gradient_as_dtensors_once(world: World) -> None:
    mesh, seen, done = _mesh(world), [], []
    whole = _whole(world, 4, 5).requires_grad_()
    x = distribute_tensor(_whole(world, 4, 5), mesh, [Replicate()]).requires_grad_()
    w, u = (distribute_tensor(_whole(world, 3, 5), mesh, [at]) for at in (Shard(0), Replicate()))
    weight = _whole(world, 3, 5)
    x.register_post_accumulate_grad_hook(lambda p: done.append((p is x, p.grad is not None)))
    grads = []
    for h, one, other in ((whole * 2, weight, weight), (x * 2, w, u)):
        first = F.linear(h, one)
        h.register_hook(lambda g, grads=grads: grads.append(g))
        h.register_hook(lambda g: g * 2)
        h.retain_grad()
        loss = first.sum() + F.linear(h, one).exp().sum() + F.linear(h, other).sin().sum()
        loss.backward()
        seen.append(h.grad)
    assert done == [(True, True)] and isinstance(grads[1], DTensor)
    for mine, plain in ((grads[1], grads[0]), (seen[1], seen[0]), (x.grad, whole.grad)):
        assert_parity(mine, plain, rtol=TOLERANCE, atol=TOLERANCE)
    handle = x.register_hook(lambda g: torch.zeros(4, 5))
    with pytest.raises(ValueError, match="gradient that a hook returns must be a DTensor of shape"):
        x.sum().backward()
    handle.remove()
    (x * 2).sum().backward()


@distributed(2, backends=TORCH)
def test_hooks_on_several_gradients_see_dtensors(world: World) -> None:
    mesh, seen = _mesh(world), []
    a, b = (distribute_tensor(_whole(world, 4), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
    torch.autograd.graph.register_multi_grad_hook((a, b), seen.append)
    (a * b).sum().backward()
    assert len(seen) == 1 and all(isinstance(g, DTensor) for g in seen[0])
    assert_parity(seen[0][0], _whole(world, 4), exact=True)


@distributed(2, backends=TORCH)
def test_autograds_functions_give_the_unsharded_gradients(world: World) -> None:
    mesh = _mesh(world)

    def leaves(at: Placement | None) -> list[Any]:
        whole = [_whole(world, 4, 5), _whole(world, 3, 5), _whole(world, 2)]
        placed = whole if at is None else [distribute_tensor(t, mesh, [at]) for t in whole]
        return [t.requires_grad_() for t in placed]

    def loss(x: Any, w: Any) -> Any:
        return F.linear(x, w).sigmoid().sum()

    x, w, unused = leaves(None)
    plain = torch.autograd.grad(loss(x, w), [x, w])
    first = torch.autograd.grad(loss(x, w), [x], create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), [w])[0]
    for at in (Shard(0), Shard(1), Replicate()) if world.size == 2 else (Shard(0),):
        dx, dw, d_unused = leaves(None)[:2] + leaves(None)[2:]
        dx, dw = (distribute_tensor(t.detach(), mesh, [at]).requires_grad_() for t in (dx, dw))
        d_unused = distribute_tensor(d_unused.detach(), mesh, [Shard(0)]).requires_grad_()
        found = torch.autograd.grad([loss(dx, dw)], [dx, dw, d_unused], allow_unused=True)
        assert found[2] is None and all(g.placements == (at,) for g in found[:2])
        for mine, expected in zip(found[:2], plain, strict=True):
            assert_parity(mine, expected, rtol=TOLERANCE, atol=TOLERANCE)
        mine = torch.autograd.grad(loss(dx, dw), [dx], create_graph=True)[0]
        assert_parity(
            torch.autograd.grad(mine.square().sum(), [dw])[0], second, rtol=TOLERANCE, atol=TOLERANCE
        )
        torch.autograd.backward([loss(dx, dw), loss(dx, dw) * 2])
        assert_parity(dx.grad, plain[0] * 3, rtol=TOLERANCE, atol=TOLERANCE)
        dx.grad = dw.grad = None
        loss(dx, dw).backward(inputs=[dx])
        assert dx.grad is not None and dw.grad is None
        y = F.linear(dx, dw)
        torch.autograd.backward([y], [distribute_tensor(torch.ones_like(y.full_tensor()), mesh)])
        with pytest.raises(NotImplementedError, match="is_grads_batched runs vmap"):
            torch.autograd.grad(loss(dx, dw), [dx], is_grads_batched=True)
    del unused


@distributed(2, backends=TORCH)
def test_detaching_freezing_and_grad_modes(world: World) -> None:
    x = distribute_tensor(_whole(world, 4), _mesh(world), [Shard(0)]).requires_grad_()
    y = x * 2
    assert y.detach().to_local().data_ptr() == y.to_local().data_ptr() and not y.detach().requires_grad
    assert y.detach_() is y and not y.requires_grad and y.is_leaf
    x.requires_grad = False
    assert not (x * 2).requires_grad and x.requires_grad_().requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(2)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():  # T12: such tensors have no version
        z = distribute_tensor(_whole(world, 4), _mesh(world), [Replicate()])
        assert (z * x).is_inference()
    h = x * 1
    h.view(2, 2).mul_(3)
    h.sum().backward()
    assert_parity(x.grad, torch.full_like(_whole(world, 4), 3.0), exact=True)
    saved = (x * 1).exp()
    saved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@distributed(2, backends=TORCH)
def test_what_nobody_holds_is_freed_at_once(world: World) -> None:
    mesh = _mesh(world)

    def locals_after(use: Callable[[Any, Any], Any]) -> int:
        w = distribute_tensor(_whole(world, 4, 5), mesh, [Replicate()]).requires_grad_()
        x = distribute_tensor(_whole(world, 4, 5), mesh, [Shard(0)])
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
    p = _parameter(world, 3, 5)
    x = distribute_tensor(_whole(world, 4, 5), _mesh(world), [Replicate()])
    assert nn.ParameterList([p])[0] is p
    out = torch.func.functional_call(nn.Linear(5, 3, bias=False), {"weight": p}, (x,))
    assert_parity(out, _whole(world, 4, 5) @ _whole(world, 3, 5).T, rtol=TOLERANCE, atol=TOLERANCE)

    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

        def right_inverse(self, x: Any) -> Any:
            return x * 0.5

    module = _module(world)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    module(x).sum().backward()
    original = module.parametrizations.weight.original
    assert isinstance(original, DTensor) and isinstance(original.grad, DTensor)
    assert_parity(module.weight, _whole(world, 3, 5), exact=True)
    buffered = nn.Module()
    buffered.register_buffer("b", distribute_tensor(_whole(world, 4), _mesh(world), [Shard(0)]))
    assert isinstance(buffered.float().b, DTensor) and buffered.b.dtype == torch.float32


@distributed(2, backends=TORCH)
def test_a_layout_says_mesh_and_placements(world: World) -> None:
    layout = hp_dtensor.Layout((2,), ("x",))("x", "None")
    with count_collectives() as counted:
        x = DTensor.from_local_with_layout(_whole(world, 2, 3), layout)
    counted.assert_counts()
    assert x.shape == (4, 3) and x.placements == (Shard(0),) and x.layout is layout
