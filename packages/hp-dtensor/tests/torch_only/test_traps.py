"""The traps of function-level dispatch on torch, T1 to T13, one after the other: each was a wrong number, a leak or a crash once.

Other files go into the details (test_foreign_functions, test_faces, test_parameters, test_torch_checkpoint); here each trap is
set as it was found.
"""

import copy
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import (
    DTensor,
    Partial,
    ShardingPlan,
    distribute_tensor,
    shard_module,
)
from hp_dtensor.spec import MOST_PLANS, remember
from hp_platform.launch._ports import reserve_ports
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, S1, TOLERANCE, TORCH, P, R, assert_equal, cut, make_mesh, whole_of


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


# -------------------------------------------------------------------------------------------------------------------- T4
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b, "@": lambda a, b: a @ b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b,
}  # fmt: skip


@distributed(2, backends=TORCH)
def test_t4_an_error_of_a_rule_is_not_made_an_unsupported_operand(world: World) -> None:
    a, b = cut(world, 5, 4), cut(world, 5, 3)
    for name, operator in OPERATORS.items():
        for first, second in ((a, b), (a, whole_of(world, 5, 3)), (whole_of(world, 5, 4), b)):
            with pytest.raises(ValueError, match=r"(?s)\(5, 4\).*\(5, 3\)"):
                operator(first, second)
        with pytest.raises(ValueError, match="requires grad, beside a DTensor"):
            operator(a, whole_of(world, 4, 4).requires_grad_())
        assert name


# -------------------------------------------------------------------------------------------------------------------- T5
@distributed(2, backends=TORCH)
def test_t5_equal_numbers_of_other_types_have_plans_of_their_own(world: World) -> None:
    whole = torch.tensor([0, 1, 2], device=world.device)
    for operator in OPERATORS.values():
        for flag in (False, True):
            x = whole > 0 if flag else whole
            for first, second in ((1, 1.0), (1.0, True), (True, 1)):
                for number in (first, second, first):
                    try:
                        expected = operator(x, number)
                    except (RuntimeError, TypeError):
                        continue  # no such operation of bools
                    found = operator(distribute_tensor(x, make_mesh(world), [S0]), number)
                    assert found.dtype == expected.dtype
                    assert_parity(found, expected, exact=True)


@distributed(2, backends=TORCH)
def test_t5_numbers_that_change_with_every_step_make_no_new_plans(world: World) -> None:
    x, y, whole = cut(world, 4, 6), cut(world, 4, 6), whole_of(world, 4, 6)
    uses: dict[str, Callable[[Any, Any, float], Any]] = {
        "mul": lambda x, y, v: x * v,
        "rsub": lambda x, y, v: v - x,
        "pow": lambda x, y, v: x.abs() ** v,
        "add": lambda x, y, v: torch.add(x, y, alpha=v),
        "addcmul": lambda x, y, v: torch.addcmul(x, x, y, value=v),
        "lerp": lambda x, y, v: torch.lerp(x, y, v),
        "clamp": lambda x, y, v: x.clamp(-v, max=v),
        "leaky_relu": lambda x, y, v: F.leaky_relu(x, v),
        "masked_fill": lambda x, y, v: x.masked_fill(y > 0, v),
        "where": lambda x, y, v: torch.where(y > 0, x, v),
        "fill_": lambda x, y, v: x.clone().fill_(v),
        "full_like": lambda x, y, v: torch.full_like(x, v),
        "foreach": lambda x, y, v: torch._foreach_mul([x, y], [v, 2 * v])[1],
        "comparison": lambda x, y, v: x > v,
        "a tensor as a number": lambda x, y, v: torch.add(x, y, alpha=torch.tensor(v, dtype=torch.float64)),
    }
    plans = x._spec.plans
    for name, use in uses.items():
        known = []
        for step in range(1, 4):
            found, expected = use(x, y, step / 7), use(whole, whole, step / 7)
            assert_parity(found, expected, rtol=TOLERANCE, name=name)
            known.append(len(plans))
        assert known[0] == known[2], name


@pytest.mark.once
def test_t5_what_values_do_make_new_plans_for_is_bounded() -> None:
    plans: dict[int, int] = {}
    for i in range(3 * MOST_PLANS):
        remember(plans, i, i)
        assert len(plans) <= MOST_PLANS and plans[i] == i
    assert list(plans) == sorted(plans)  # the oldest go first


# -------------------------------------------------------------------------------------------------------------------- T6
@distributed(2, backends=TORCH)
def test_t6_dtensors_are_shown_in_texts(world: World) -> None:
    x = cut(world, 5, 4).requires_grad_()
    for at in (S0, R):
        p = nn.Parameter(cut(world, 5, 4, at=at))
        for text in (f"{p}", repr(p), str(p), "%s" % (p,), format(p), f"{[p]}", f"{{'p': {p}}}"):  # noqa: UP031
            assert "shape=(5, 4)" in text and str(at) in text
    with pytest.raises(ValueError, match=r"the data of a DTensor must be a DTensor"):
        x.data = whole_of(world, 5, 4)
    x.register_hook(lambda g: cut(world, 3))
    loss = x.sum()
    with pytest.raises(
        ValueError, match=r"gradient that a hook returns must be a DTensor.*got DTensor\(shape=\(3,\)"
    ):
        loss.backward()
    assert "4" in f"{cut(world, at=R).fill_(4)}"


# -------------------------------------------------------------------------------------------------------------------- T7
@distributed((2, 3), backends=TORCH)
def test_t7_what_changes_nothing_is_the_same_tensor_and_shares_its_mark(world: World) -> None:
    w = [cut(world, 6, 4) for _ in range(3)]

    def reductions(same: Callable[[Any], Any]) -> int:
        x = cut(world, 5, 4, at=R).requires_grad_()
        loss = sum(F.linear(same(x), one).square().sum() for one in w)
        with count_collectives() as counted:
            loss.backward()
        plain = whole_of(world, 5, 4).requires_grad_()
        (3 * F.linear(plain, whole_of(world, 6, 4)).square().sum()).backward()
        assert_equal(x.grad, plain.grad)
        assert set(counted.counts) <= {"all_reduce"}
        return counted.counts["all_reduce"]

    for same in (
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float64),
        lambda x: x.to(x.device),
        lambda x: x.double(),
        lambda x: x.type_as(x),
        lambda x: x.redistribute(placements=[R]),
    ):
        assert reductions(same) == 1
    # Other tensors over the same memory have marks of their own: right, and one reduction each.
    assert reductions(lambda x: x.view(5, 4)) == 3


# -------------------------------------------------------------------------------------------------------------------- T8
@distributed(2, backends=TORCH)
def test_t8_nothing_of_ours_holds_a_parameter_weakly(world: World) -> None:
    p = nn.Parameter(cut(world, 5, 4, at=R))
    p.register_post_accumulate_grad_hook(lambda leaf: None)
    p.register_hook(lambda g: None)
    F.linear(cut(world, 3, 4), p).sum().backward()
    F.linear(cut(world, 3, 4), p)
    assert weakref.getweakrefcount(p) == 0
    other = nn.Parameter(cut(world, 2, 4, at=R))
    torch.utils.swap_tensors(p, other)
    assert (p.shape, other.shape) == ((2, 4), (5, 4))
    known = weakref.ref(p)
    with pytest.raises(RuntimeError, match="weakref"):  # torch's own limit, as of any tensor
        torch.utils.swap_tensors(p, other)
    assert known() is p


# -------------------------------------------------------------------------------------------------------------------- T9
@distributed(2, backends=TORCH)
def test_t9_staging_copies_the_piece_and_no_caches(world: World) -> None:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    w = nn.Parameter(cut(world, 5, 4, at=R))
    (F.linear(cut(world, 3, 4), w) ** 2).sum().backward()
    F.linear(cut(world, 3, 4), w)
    assert (
        w._marks.by_dims and w.grad is not None and w._grad_dtensor is not None
    )  # caches that could be copied
    w.note = "mine"
    staged = StateDictStager(pin_memory=False, share_memory=False).stage({"w": w, "plain": torch.ones(2)})[
        "w"
    ]
    for made in (staged, copy.copy(w), copy.deepcopy(w)):
        assert isinstance(made, DTensor) and made._spec is w._spec and made.note == "mine"
        assert getattr(made, "_marks", None) is None
        assert getattr(made, "_copy_of_view", None) is None
        assert set(vars(made)) <= {"note", "_is_param"}  # torch's mark of a Parameter
    assert getattr(staged, "_grad_dtensor", None) is None
    before = whole_of(world, 5, 4)
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(staged.to_local().cpu(), before.cpu())
    assert staged.to_local().data_ptr() != w.to_local().data_ptr()


# ------------------------------------------------------------------------------------------------------------------- T10
@distributed(2, backends=TORCH)
def test_t10_a_whole_plain_tensor_is_cut_by_copy_and_refused_elsewhere(world: World) -> None:
    for at in (S0, S1, R):
        x = cut(world, 5, 4, at=at).zero_()
        with count_collectives() as counted:
            x.copy_(whole_of(world, 5, 4))
        counted.assert_counts()
        assert_equal(x, whole_of(world, 5, 4), str(at))
        module = nn.Linear(4, 5, bias=False, dtype=torch.float64, device=world.device)
        module.weight = nn.Parameter(x.clone().zero_())
        module.load_state_dict({"weight": whole_of(world, 5, 4)})
        assert_equal(module.weight, whole_of(world, 5, 4), str(at))
    with pytest.raises(ValueError, match="plain tensor"):
        whole_of(world, 5, 4).copy_(x)
    with pytest.raises(ValueError, match="plain tensor"):
        whole_of(world, 5, 4).add_(x)
    with pytest.raises(ValueError, match="requires grad"):
        x.copy_(whole_of(world, 5, 4).requires_grad_())
    with pytest.raises(ValueError, match="requires grad"):
        torch.mul(x, whole_of(world, 5, 4).requires_grad_())


# ------------------------------------------------------------------------------------------------------------------- T11
@distributed(2, backends=TORCH)
def test_t11_a_sum_is_no_parameter(world: World) -> None:
    for kind in ("sum", "avg", "max"):
        x = cut(world, 5, 4, at=Partial(kind))
        with pytest.raises(ValueError, match="cannot be trained"):
            nn.Parameter(x)
        with pytest.raises(ValueError, match="cannot be trained"):
            x.requires_grad_()
        with pytest.raises(ValueError, match="cannot be trained"):
            x.requires_grad = True
        assert not nn.Parameter(x, requires_grad=False).requires_grad
    module = nn.Linear(4, 5, dtype=torch.float64, device=world.device)
    with pytest.raises(ValueError, match="a parameter cannot be a sum"):
        shard_module(module, make_mesh(world), ShardingPlan({"weight": [P]}))


# ------------------------------------------------------------------------------------------------------------------- T12
@distributed(2, backends=TORCH)
def test_t12_inference_tensors_without_a_version_are_used(world: World) -> None:
    w, expected = (
        cut(world, 3, 4, at=R).requires_grad_(),
        F.linear(whole_of(world, 5, 4), whole_of(world, 3, 4)),
    )
    x = cut(world, 5, 4)
    F.linear(x, w)
    with torch.inference_mode():
        for weight in (w, cut(world, 3, 4, at=R), cut(world, 3, 4).redistribute(placements=[R])):
            for _ in range(2):
                y = F.linear(cut(world, 5, 4), weight)
                assert y.is_inference() and not y.requires_grad
                assert_equal(y, expected)
        held = cut(world, 3, 4, at=R)
    assert_equal(F.linear(x, held), expected)  # outside again
    y = F.linear(x, w)
    y.sum().backward()
    assert_equal(w.grad, whole_of(world, 5, 4).sum(0).expand(3, 4))


# ------------------------------------------------------------------------------------------------------------------- T13
PROGRAM = """
import torch
import torch.nn.functional as F
from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
mesh = init_device_mesh("cpu", (2,))
w = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
F.linear(x, w).sum().backward()
kept = w.grad.redistribute(placements=[Shard(1)]), x.redistribute(placements=[Replicate()], async_op=True)
print("done", x.full_tensor().sum().item())
"""


@pytest.mark.once
def test_t13_a_program_that_just_ends_with_dtensors_ends_well() -> None:
    with reserve_ports() as ports:
        place = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports.first),
            "HYPER_PARALLEL_PLATFORM": "torch",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert (rank.returncode, out) == (0, "done 16.0\n"), err
            assert "terminate called" not in err
