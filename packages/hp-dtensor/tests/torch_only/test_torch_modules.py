"""DTensors in torch's modules, their attributes, and beside torch's own DTensors; what goes below the Python function level."""

import sys
from pathlib import Path

import pytest
import torch

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import TORCH, make_mesh
from torch_operands import tensors_for

# Elementwise functions and a single product, in float64.
TOLERANCE = 1e-13


@distributed(world_size=2, backends=TORCH)
def test_what_slips_below_python_raises(world: World) -> None:
    x = distribute_tensor(torch.ones(4, device=world.device), make_mesh(world), [Shard(0)])
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(NotImplementedError, match="below the Python function level"),
    ):
        torch.exp(x)
    with pytest.raises(NotImplementedError, match=r"Tensor.numpy has no rule"):
        x.numpy()


@distributed(world_size=2, backends=TORCH)
def test_modules_train_on_parameters_that_are_dtensors(world: World) -> None:
    torch.manual_seed(0)
    plain = (
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
        .double()
        .to(world.device)
    )
    data = torch.randn(5, 4, dtype=torch.float64, device=world.device)
    places = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}
    expected = plain(data).square().mean()
    expected.backward()
    sharded = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
    for name, parameter in plain.named_parameters():
        index, attribute = name.split(".")
        value = torch.nn.Parameter(distribute_tensor(parameter.detach(), make_mesh(world), [places[name]]))
        assert isinstance(value, torch.nn.Parameter)
        setattr(sharded[int(index)], attribute, value)
    loss = sharded(distribute_tensor(data, make_mesh(world), [Replicate()])).square().mean()
    with count_collectives() as counted:
        loss.backward()
    counted.assert_counts()  # the input needs no gradient, every weight has its own rows
    assert_parity(loss.full_tensor(), expected, rtol=TOLERANCE, name="loss")
    for name, parameter in plain.named_parameters():
        assert_parity(
            dict(sharded.named_parameters())[name].grad,
            parameter.grad,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            name=name,
        )


@distributed(world_size=2, backends=TORCH)
def test_shapes_dtypes_and_attributes_are_those_of_torch(world: World) -> None:
    x = distribute_tensor(torch.ones(4, 3, device=world.device), make_mesh(world), [Shard(0)])
    assert isinstance(x, torch.Tensor)
    assert x.shape == torch.Size([4, 3])
    assert x.shape.numel() == x.numel() == torch.numel(x) == 12
    assert (x.dtype, x.device, x.is_cpu) == (torch.float32, x.to_local().device, world.device_type == "cpu")
    assert x.is_floating_point()
    assert (x * 2).requires_grad is False
    assert x.requires_grad_() is x
    assert (x * 2).grad_fn is not None


@distributed(world_size=2, backends="torch")
def test_values_gradients_and_placements_agree_with_torchs_own(world: World) -> None:
    from torch.distributed import tensor as oracle

    mesh = make_mesh(world)
    theirs = torch.distributed.init_device_mesh("cpu", (2,))
    convert = {
        Shard(0): oracle.Shard(0),
        Shard(1): oracle.Shard(1),
        Replicate(): oracle.Replicate(),
        Partial(): oracle.Partial(),
    }
    a, b = tensors_for("mm")["x"], tensors_for("mm")["other"]
    for at_a, at_b in (
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Replicate()),
    ):
        ours = [distribute_tensor(t.clone().requires_grad_(), mesh, [p]) for t, p in ((a, at_a), (b, at_b))]
        other = [
            oracle.distribute_tensor(t.clone(), theirs, [convert[p]]).requires_grad_()
            for t, p in ((a, at_a), (b, at_b))
        ]
        mine, other_result = ours[0] @ ours[1], other[0] @ other[1]
        assert [convert[p] for p in mine.placements] == list(other_result.placements)
        mine.sum().backward()
        other_result.sum().backward()
        for x, y in zip(
            (mine, ours[0].grad, ours[1].grad), (other_result, other[0].grad, other[1].grad), strict=True
        ):
            assert_parity(x, y.full_tensor(), rtol=TOLERANCE, name=f"{at_a} {at_b}")
