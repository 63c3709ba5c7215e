"""Wrong calls of products, layers and matrix functions, each refused with what to change; and the layer that torch writes in Python."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

Make = Callable[..., Any]
CALLS: dict[str, tuple[Callable[[Make], Any], str]] = {
    "sizes of an added product": (
        lambda x: torch.addmm(x(5, 2), x(5, 3), x(4, 2)),
        r"addmm of shapes \(5, 3\) and \(4, 2\): the inner sizes 3 and 4 differ",
    ),
    "an input that does not stretch": (
        lambda x: torch.addmm(x(1, 5, 2), x(5, 3), x(3, 2)),
        r"what is added has shape \(1, 5, 2\), the product \(5, 2\): it must stretch to that",
    ),
    "dims of a batched product": (
        lambda x: torch.baddbmm(x(2, 3, 3), x(3, 3), x(3, 3)),
        r"baddbmm takes tensors with 3, 3 dims, got shapes \(3, 3\), \(3, 3\)",
    ),
    "an outer product of matrices": (
        lambda x: torch.outer(x(2, 2), x(2)),
        "outer takes tensors with 1, 1 dims",
    ),
    "an equation with too few operands": (
        lambda x: torch.einsum("ij,jk->ik", x(2, 2)),
        r"einsum\('ij,jk->ik'\) names 2 operands, got 1",
    ),
    "an equation of other dims": (
        lambda x: torch.einsum("ijk->i", x(2, 2)),
        "the term 'ijk' does not fit a tensor with 2 dims",
    ),
    "an output letter from nowhere": (
        lambda x: torch.einsum("ij->ik", x(2, 2)),
        "each letter of the output stands in an operand, and once in the output",
    ),
    "dims that cannot be contracted": (
        lambda x: torch.tensordot(x(2, 3), x(2, 3), ([0, 1], [0])),
        "tensordot takes a number of dims, or two lists of as many dims",
    ),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4), dropout_p=1.5),
        "a probability lies between 0 and 1, got 1.5",
    ),
    "a causal mask twice": (
        lambda x: F.scaled_dot_product_attention(
            x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4), attn_mask=x(3, 3), is_causal=True
        ),
        "attn_mask and is_causal exclude each other",
    ),
    "keys and values of two lengths": (
        lambda x: F.scaled_dot_product_attention(x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 5, 4)),
        "keys and values one length",
    ),
    "a weight for other channels": (
        lambda x: F.conv1d(x(2, 3, 5), x(4, 2, 3)),
        r"a weight of shape \(4, 2, 3\) in 1 groups needs 2 channels, got 3",
    ),
    "an image for a convolution of rows": (
        lambda x: F.conv1d(x(2, 3, 5, 5), x(4, 3, 3)),
        "conv1d takes an input with 2 or 3 dims and a weight with 3",
    ),
    "two strides in three dims": (
        lambda x: F.conv3d(x(1, 2, 3, 3, 3), x(2, 2, 1, 1, 1), None, (1, 2)),
        r"stride is \(1, 2\): give one number, or 3",
    ),
    "a pool of a matrix": (lambda x: F.max_pool2d(x(3, 3), 2), "max_pool2d takes a tensor with 3 or 4 dims"),
    "a size and a factor": (
        lambda x: F.interpolate(x(1, 2, 4), 8, 2.0),
        "interpolate needs either size or scale_factor",
    ),
    "the inverse of a vector": (lambda x: torch.linalg.inv(x(3)), "takes a matrix or a batch of matrices"),
}


@pytest.mark.parametrize("name", CALLS)
@distributed(2, backends="torch")
def test_wrong_call_of_a_product_is_refused(name: str, world: World) -> None:
    mesh = init_device_mesh("cpu", (2,))
    call, text = CALLS[name]
    with pytest.raises(ValueError, match=text):
        call(lambda *shape: distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))


@distributed(2, backends="torch")
def test_attention_in_one_function_runs_its_python_body(world: World) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = torch.nn.MultiheadAttention(4, 2, dtype=torch.float64)
    sharded = copy.deepcopy(plain)
    for module in (sharded, sharded.out_proj):
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            setattr(module, name, torch.nn.Parameter(value))
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    expected, _ = plain(x, x, x, need_weights=False)
    cut = distribute_tensor(x, mesh, [Shard(1)])
    found, _ = sharded(cut, cut, cut, need_weights=False)
    # A few dozen roundings of numbers below 10 in float64.
    assert_parity(found, expected, atol=1e-13, name="attention")
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert_parity(sharded.get_parameter(name).grad, parameter.grad, atol=1e-12, name=name)


NAMED: dict[str, Callable[[Any], Any]] = {
    "Tensor.__matmul__": lambda x: x @ x,
    "Tensor.view": lambda x: x.view(7),
    "Tensor.split": lambda x: x.split([9]),
    "torch.mm": lambda x: torch.mm(x, x),
    "torch.stack": lambda x: torch.stack([x, x[0]]),
    "layer_norm": lambda x: F.layer_norm(x, (9,)),
}


@pytest.mark.parametrize("name", NAMED)
@distributed(2, backends="torch")
def test_an_error_names_the_operation_as_users_write_it(name: str, world: World) -> None:
    x = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ValueError, match=f"^{name} of "):
        NAMED[name](x)
