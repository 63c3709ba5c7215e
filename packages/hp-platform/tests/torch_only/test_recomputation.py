"""Whether torch's checkpointing runs a forward again, and how it casts by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hp_platform import get_platform


def test_the_second_forward_of_a_checkpoint_is_seen():
    seen = []

    def forward(x):
        seen.append(get_platform().is_recomputing())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not get_platform().is_recomputing()


def test_casts_of_autocast_are_brought_back():
    x, platform = torch.ones(2, 2), get_platform()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        as_then = platform.autocast_state()
    with as_then():
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        platform.autocast_state()(),
        torch.autocast("cpu", enabled=False),
    ):
        assert (x @ x).dtype is torch.float32


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (torch.matmul, lambda x: x @ x),
        (F.linear, lambda x: F.linear(x, x, x[0])),
        (torch.mm, lambda x: torch.mm(x, x)),
        (torch.Tensor.exp, lambda x: x.exp()),
        (torch.ops.aten.sin, lambda x: x.sin()),
        (torch.ops.aten.sin.default, lambda x: x.sin()),
        (F.scaled_dot_product_attention, lambda x: F.scaled_dot_product_attention(*([x[None, None]] * 3))),
        (F.layer_norm, lambda x: F.layer_norm(x, (2,))),
        (torch.softmax, lambda x: x.softmax(0)),
    ],
)
def test_functions_are_made_of_the_operations_that_are_seen_when_they_run(function, call):
    platform, seen = get_platform(), []

    def note(operation, args, kwargs):
        seen.append(operation)
        return operation(*args, **kwargs)

    with platform.watch_operations(note):
        call(torch.ones(2, 2))
    assert platform.operations_of(function) & set(seen)


def test_what_is_no_function_of_torch_is_made_of_nothing():
    for given in (print, "mm", 3, [], lambda x: x):
        assert get_platform().operations_of(given) == frozenset()


def test_operations_that_write_or_give_views_or_draw_cannot_be_kept():
    aten, platform = torch.ops.aten, get_platform()
    assert platform.can_be_kept(aten.mm.default)
    assert not platform.can_be_kept(aten.view.default)
    assert not platform.can_be_kept(aten.add_.Tensor)
    assert not platform.can_be_kept(aten.mm.out)
    assert not platform.can_be_kept(aten.new_empty.default)
    assert not platform.can_be_kept(aten.rand_like.default)
    assert not platform.can_be_kept(aten.native_dropout.default)


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "flash_attention_for_cpu"])
def test_attention_can_be_kept_unless_it_drops(name):
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    names = [argument.name for argument in operation._schema.arguments]
    x, place, platform = torch.ones(1, 1, 2, 2), names.index("dropout_p"), get_platform()
    args = [x if "Tensor" in str(argument.type) else True for argument in operation._schema.arguments[:place]]
    assert platform.can_be_kept(operation, args)
    assert platform.can_be_kept(operation, [*args, 0.0])
    assert not platform.can_be_kept(operation, [*args, 0.1])
    assert not platform.can_be_kept(operation, args, {"dropout_p": 0.1})
