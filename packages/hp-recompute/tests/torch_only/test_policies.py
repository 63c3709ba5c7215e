"""Selective recompute: what the policy keeps is not computed again, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_platform import get_platform
from hp_recompute import CheckpointError, CheckpointPolicy, checkpoint

aten = torch.ops.aten
WEIGHTS = [torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8) * (i + 1) for i in range(3)]


def layer(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = F.gelu(F.linear(x, weight)) + x
    heads = x.view(2, 1, 4, 8)
    x = F.scaled_dot_product_attention(heads, heads, heads).reshape(8, 8)
    return F.dropout(x, 0.5).sin()


def gradients(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 64, dtype=torch.float64).reshape(8, 8).requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in WEIGHTS]
    y = run(layer, x, weights)
    (y * y).sum().backward()
    return [y.detach(), x.grad, *(weight.grad for weight in weights), torch.rand(2)]


POLICIES: dict[str, Any] = {
    "products": [torch.matmul],
    "attention": [F.scaled_dot_product_attention],
    "both": [F.linear, F.scaled_dot_product_attention, aten.native_dropout.default, aten.bernoulli_.float],
    "all": lambda context, operation, *args, **kwargs: True,
    "none": lambda context, operation, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
    "gelu by name": lambda context, operation, *args, **kwargs: (
        CheckpointPolicy.PREFER_SAVE if "gelu" in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE
    ),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_numbers_are_those_of_the_plain_call(policy: Any, early_stop: bool) -> None:
    found = gradients(lambda *args: checkpoint(*args, policy_fn=policy, early_stop=early_stop))
    for one, other in zip(found, gradients(lambda function, *args: function(*args)), strict=True):
        assert torch.equal(one, other)


def operations_in(run: Callable[[], Any]) -> Counter[str]:
    seen: Counter[str] = Counter()

    def note(operation: Any, args: Any, kwargs: Any) -> Any:
        seen[str(operation)] += 1
        return operation(*args, **kwargs)

    with get_platform().watch_operations(note):
        run()
    return seen


def products_are(answer: CheckpointPolicy) -> Any:
    """A policy that says so of products, and the other way round of all else."""
    is_kept = answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return lambda context, operation, *args, **kwargs: answer if "mm" in str(operation) else not is_kept


@pytest.mark.parametrize(
    ("policy", "products", "others"),
    [
        ([torch.matmul], 6, 3),
        ([F.gelu], 9, 0),
        (None, 9, 3),
        (products_are(CheckpointPolicy.MUST_SAVE), 6, 3),
        (products_are(CheckpointPolicy.PREFER_SAVE), 6, 3),
        (products_are(CheckpointPolicy.MUST_RECOMPUTE), 9, 0),
        (products_are(CheckpointPolicy.PREFER_RECOMPUTE), 9, 0),
    ],
)
def test_what_is_kept_is_not_computed_again(policy: Any, products: int, others: int) -> None:
    x = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
    weights = [weight.clone().requires_grad_() for weight in WEIGHTS]
    y = checkpoint(layer, x, weights, policy_fn=policy).sum()
    seen = operations_in(y.backward)
    # Backward has two products for each; the second run has the rest.
    assert seen["aten.mm.default"] == products
    assert seen["aten.gelu.default"] == others


@pytest.mark.parametrize(
    "policy",
    [
        [F.scaled_dot_product_attention],
        lambda context, operation, *args, **kwargs: "scaled_dot_product" in str(operation),
    ],
    ids=["listed", "by name"],
)
def test_attention_is_kept_unless_it_drops(policy: Any) -> None:
    def attention(x: torch.Tensor, dropped: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropped).sin() * torch.rand(3, 4)

    def run(dropped: float, **options: Any) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 12).reshape(1, 1, 3, 4).requires_grad_()
        y = checkpoint(attention, x, dropped, **options).sum()
        seen = operations_in(y.backward)
        assert x.grad is not None
        again = [name for name in seen if "scaled_dot_product" in name and "backward" not in name]
        return x.grad, len(again)

    for dropped in (0.0, 0.5):
        (found, kept), (expected, again) = run(dropped, policy_fn=policy), run(dropped)
        assert torch.equal(found, expected)
        # With dropout attention is made of other operations on the cpu.
        assert (kept, again) == ((0, 1) if dropped == 0.0 else (0, 0))


def test_another_backward_takes_the_kept_results_again() -> None:
    x = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
    y = checkpoint(layer, x, [WEIGHTS[0].clone().requires_grad_()], policy_fn=[torch.matmul]).sum()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    assert operations_in(y.backward)["aten.mm.default"] == 2
    assert torch.equal(x.grad, first)


def test_checkpoints_with_policies_nest() -> None:
    def outer(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return checkpoint(layer, x, weights, policy_fn=[torch.matmul])

    found = gradients(lambda function, *args: checkpoint(outer, *args, policy_fn=[F.gelu]))
    for one, other in zip(found, gradients(lambda function, *args: function(*args)), strict=True):
        assert torch.equal(one, other)


def test_later_draws_are_the_same_though_the_policy_keeps_earlier_ones() -> None:
    def draws(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return F.dropout(x * torch.rand_like(x), 0.5).sin()

    found = gradients(lambda function, *args: checkpoint(draws, *args, policy_fn=[aten.rand_like.default]))
    for one, other in zip(found, gradients(lambda function, *args: draws(*args)), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_kept_result_that_is_changed_in_place_is_told() -> None:
    def in_place(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu_().sin()

    x = torch.ones(4, 4, requires_grad=True)
    y = checkpoint(in_place, x, policy_fn=[torch.matmul]).sum()
    with pytest.raises(CheckpointError, match=r"aten.mm.default that the policy keeps was changed in place"):
        y.backward()


def test_a_policy_that_changes_its_mind_is_told() -> None:
    x = torch.ones(4, 4, requires_grad=True)

    def only_later(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
        return context.is_recompute and operation is aten.mm.default

    y = checkpoint(lambda x: (x @ x).sin(), x, policy_fn=only_later).sum()
    with pytest.raises(CheckpointError, match="1th time in the second run, and was kept 0 times"):
        y.backward()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("matmul", "give a function"),
        (3, "give a function"),
        ([print], "it is not known which operations <built-in function print> is made of"),
        (lambda *args, **kwargs: "save", "policy_fn answered 'save' for aten"),
        (lambda *args, **kwargs: None, "policy_fn answered None for aten"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoint(lambda x: x.sin().cos(), torch.ones(2, requires_grad=True), policy_fn=policy)


def test_operations_are_compared_when_asked_for_with_a_policy_too() -> None:
    found = gradients(
        lambda *args: checkpoint(*args, policy_fn=[torch.matmul], determinism_check="operations")
    )
    for one, other in zip(found, gradients(lambda function, *args: function(*args)), strict=True):
        assert torch.equal(one, other)
