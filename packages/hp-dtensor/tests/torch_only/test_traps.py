"""The traps of function-level dispatch on torch, T1 to T3, those of gradients: each was a wrong number or a leak once.

Other files go into the details (test_foreign_functions, test_faces, test_parameters, test_torch_checkpoint); here each trap is
set as it was found. T4 and T5 stand in test_traps_of_plans, T6 to T13 in test_traps_of_objects.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import (
    DTensor,
    distribute_tensor,
)
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, S1, TORCH, R, assert_equal, cut, make_mesh, whole_of


# -------------------------------------------------------------------------------------------------------------------- T1
class Tripled(torch.autograd.Function):
    """A user's Function, which knows nothing of DTensors."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 3


@distributed(2, backends=TORCH)
def test_t1_a_foreign_function_keeps_the_gradient(world: World) -> None:
    for at in (S0, S1, R):
        x = cut(world, 5, 3, at=at).requires_grad_()
        y = Tripled.apply(x)
        assert isinstance(y, DTensor) and y.requires_grad
        (y * y).sum().backward()
        assert_equal(x.grad, whole_of(world, 5, 3) * 18, str(at))


# -------------------------------------------------------------------------------------------------------------------- T2
Ask = Callable[[Any, Any], Any]
"""Given the gathered tensor and what computes the loss from it: the gradient that somebody sees at the gathered tensor."""


def _by_hook(h: Any, loss: Any) -> Any:
    seen: list[Any] = []
    h.register_hook(seen.append)
    loss(h).backward()
    return seen[0]


def _by_retained_grad(h: Any, loss: Any) -> Any:
    h.retain_grad()
    loss(h).backward()
    return h.grad


def _by_hook_on_several(h: Any, loss: Any) -> Any:
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((h,), seen.append)
    loss(h).backward()
    return seen[0][0]


def _by_edge(h: Any, loss: Any) -> Any:
    edge = torch.autograd.graph.get_gradient_edge(h)
    return h._wrap(torch.autograd.grad(loss(h).to_local(), [edge])[0], h._spec.grad)


def _by_grad(h: Any, loss: Any) -> Any:
    return torch.autograd.grad(loss(h), [h])[0]


def _by_inputs(h: Any, loss: Any) -> Any:
    loss(h).backward(inputs=[h])
    return h.grad


BEFORE: dict[str, Ask] = {
    "register_hook": _by_hook, "retain_grad": _by_retained_grad, "several": _by_hook_on_several, "edge": _by_edge,
}  # fmt: skip
AFTER: dict[str, Callable[[Any, Any], Any]] = {
    "register_hook": lambda h, loss: h.register_hook(print),
    "retain_grad": lambda h, loss: h.retain_grad(),
    "several": lambda h, loss: torch.autograd.graph.register_multi_grad_hook((h,), print),
    "edge": lambda h, loss: torch.autograd.graph.get_gradient_edge(h),
    "autograd.grad": lambda h, loss: torch.autograd.grad(loss, [h]),
    "backward(inputs=)": lambda h, loss: loss.backward(inputs=[h]),
    "autograd.backward(inputs=)": lambda h, loss: torch.autograd.backward([loss], inputs=[h]),
}


def _gathered(world: World) -> tuple[Any, Any, Any]:
    """A leaf, what was gathered of it, and a loss in which ranks use that alike and differently."""
    x, w = (cut(world, *shape).requires_grad_() for shape in ((5, 4), (6, 4)))

    def loss(h: Any) -> Any:
        return (F.linear(h, w) ** 2).sum() + (h * h).sum()

    return x, (x * 3).redistribute(placements=[R]), loss


def _expected(world: World) -> tuple[Any, Any]:
    x, w = (whole_of(world, *shape).requires_grad_() for shape in ((5, 4), (6, 4)))
    h = x * 3
    h.retain_grad()
    ((F.linear(h, w) ** 2).sum() + (h * h).sum()).backward()
    return h.grad, x.grad


@distributed((2, 3), backends=TORCH)
def test_t2_whoever_asks_before_the_use_sees_the_whole_gradient_of_a_gathered_tensor(world: World) -> None:
    at_h, at_x = _expected(world)
    for name, ask in BEFORE.items():
        x, h, loss = _gathered(world)
        assert_equal(ask(h, loss), at_h, name)
        if name != "edge":  # that goes no further
            assert_equal(x.grad, at_x, name)
    # These ask after the use by nature; what is no gathered tensor any more has one face only.
    for name, later in (("autograd.grad", _by_grad), ("backward(inputs=)", _by_inputs)):
        x, h, loss = _gathered(world)
        with pytest.raises(RuntimeError, match="asked for after operations have used it"):
            later(h, loss)
        h = h * 1
        assert h._marks is None
        assert_equal(_by_grad(h, loss), at_h, name)


@distributed(2, backends=TORCH)
def test_t2_whoever_asks_after_the_use_is_refused(world: World) -> None:
    for name, ask in AFTER.items():
        _, h, loss = _gathered(world)
        value = loss(h)
        with pytest.raises(
            RuntimeError, match=r"has gathered was asked for after .* right after redistribute"
        ):
            ask(h, value)
        assert name


# -------------------------------------------------------------------------------------------------------------------- T3
def _set(w: Any, value: Any) -> None:
    with torch.no_grad():
        w.set_(value)


def _set_local(w: Any, value: Any) -> None:
    with torch.no_grad():
        w.to_local().set_(value.to_local())


def _swap(w: Any, value: Any) -> None:
    torch.utils.swap_tensors(w, value.requires_grad_())


REPLACE: dict[str, Callable[[Any, Any], Any]] = {
    "data": lambda w, value: setattr(w, "data", value),
    "data of the local tensor": lambda w, value: setattr(w.to_local(), "data", value.to_local()),
    "data of the data": lambda w, value: w.data.copy_(value),
    "local data in place": lambda w, value: w.to_local().data.copy_(value.to_local()),
    "set_": _set,
    "set_ of the local tensor": _set_local,
    "swap_tensors": _swap,
}


@pytest.mark.parametrize("way", REPLACE)
@distributed(2, backends=TORCH)
def test_t3_a_mark_does_not_keep_memory_that_was_replaced(way: str, world: World) -> None:
    w, x = cut(world, 3, 4, at=R).requires_grad_(), cut(world, 5, 4)
    F.linear(x, w)
    assert w._marks.by_dims  # the trap is set
    new = whole_of(world, 3, 4) * 7
    REPLACE[way](w, distribute_tensor(new, make_mesh(world), [R]))
    y = F.linear(x, w)
    assert_equal(y, F.linear(whole_of(world, 5, 4), new), way)
    (y * y).sum().backward()
    plain = new.clone().requires_grad_()
    (F.linear(whole_of(world, 5, 4), plain) ** 2).sum().backward()
    assert_equal(w.grad, plain.grad, way)
