"""The two products with their gradients. Each is the backward of the other, so second derivatives are right too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hp_dtensor import conversions
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.transport import Cut
from hp_platform import get_platform
from hp_platform.on_platform import once
from hp_tp.overlap.copies import halves_for
from hp_tp.overlap.gathered import gather_and_multiply
from hp_tp.overlap.matrices import Matrices
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.overlap.scattered import multiply_and_scatter

Tensor = Any
_DEFAULT = OverlapPolicy()


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    cut: Cut,
    *,
    biases: Sequence[Tensor | None] | None = None,
    policy: OverlapPolicy = _DEFAULT,
    used: Callable[[], None] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The whole of an input that is cut along a dim, and its products with this rank's parts of weights, beside each other.

    Args:
        x: this rank's piece ``(..., own length, ..., in)``, cut along ``cut.dim``, which is not the last.
        weights: ``(out_i, in)`` each, of x's dtype; several share one gather. Plain tensors: of this rank.
        cut: how the dim is dealt to the ranks.
        biases: ``(out_i,)`` each, or None.
        policy: from which size on the product is cut; equal on all ranks.
        used: called when the backward begins.

    Returns ``([x_whole @ weight_i.T + bias_i], x_whole)``, ``(..., whole length, ..., out_i)`` each. The whole may be used like any
    other tensor (by other modules that get the same input); what it is used for may differ between ranks.

    Communication: the bytes of the whole, one all-gather (or the pieces as sends, see :class:`OverlapPolicy`); in backward one
    reduce-scatter of as many bytes for all uses of the whole together, beside the gradients of the weights, or in chunks where these
    are not wanted. ValueError for a piece, dim or weight that does not fit. In a group of one rank nothing is communicated.
    """
    platform, weights = get_platform(), list(weights)
    biases = [None] * len(weights) if biases is None else list(biases)
    _check(x, weights, cut, cut.sizes[cut.index], "all_gather_matmul")
    if len(biases) != len(weights):
        raise ValueError(
            f"all_gather_matmul got {len(weights)} weights and {len(biases)} biases: one each, or None"
        )
    if len(cut.sizes) == 1:
        return [platform.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], x
    rows = _rows_beside(x, x.shape[-1], cut, policy)
    if rows is None:
        whole = conversions.gather_varying(x, cut, None, used)
        return [platform.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)], whole
    plan = _Plan(rows, policy, len(weights), used)
    x, *weights = _as_multiplied([x, *weights])
    biases = [bias if bias is None else platform.cast(bias, x.dtype) for bias in biases]
    factors = [platform.transpose(weight, 0, 1) for weight in weights]
    *products, whole = _functions().Gather.apply(plan, x, *factors, *biases)
    return products, whole


def matmul_reduce_scatter(x: Tensor, weight: Tensor, cut: Cut, *, policy: OverlapPolicy = _DEFAULT) -> Tensor:
    """This rank's piece of the sum over ranks of ``x @ weight.T``, reduced while it is computed.

    Args:
        x: ``(..., whole length, ..., in)``, with this rank's part of the features.
        weight: ``(out, in)`` of x's dtype; a plain tensor: this rank's columns.
        cut: how dim ``cut.dim``, which is not the last, is dealt to the ranks.
        policy: from which size on the product is cut; equal on all ranks.

    Returns ``(..., own length, ..., out)``. A bias belongs behind the reduction: add it to the result.

    Communication: the bytes of the whole ``(..., out)``, one reduce-scatter or one per chunk; in backward one all-gather of as many
    bytes, beside the input's gradient. ValueError for an input, dim or weight that does not fit. In a group of one rank nothing is
    communicated.
    """
    platform = get_platform()
    _check(x, [weight], cut, sum(cut.sizes), "matmul_reduce_scatter")
    if len(cut.sizes) == 1:
        return platform.linear(x, weight)
    rows = _rows_beside(x, weight.shape[0], cut, policy)
    if rows is None:
        return conversions.reduce_scatter(platform.linear(x, weight), cut)
    plan = _Plan(rows, policy, 1, None)
    x, weight = _as_multiplied([x, weight])
    result: Tensor = _functions().Scatter.apply(plan, x, platform.transpose(weight, 0, 1))
    return result


def _rows_beside(x: Tensor, features: int, cut: Cut, policy: OverlapPolicy) -> Matrices | None:
    """How the rows lie; None if everything runs one after the other: wholes that lie like ``x`` are small for what moves them."""
    platform, shape = get_platform(), x.shape
    dtype = platform.product_dtype(x)
    others = math.prod(shape[: cut.dim]) * math.prod(shape[cut.dim + 1 : -1])
    nbytes = others * sum(cut.sizes) * features * platform.itemsize(dtype)
    if policy.is_plain(nbytes):
        return None
    rows = Matrices.of(tuple(shape), cut)
    if (
        nbytes < policy.min_nbytes
        and halves_for(dtype, platform.device_of(x), features, rows, policy) is None
    ):
        return None
    return rows


def _as_multiplied(xs: list[Tensor]) -> list[Tensor]:
    """In the dtype in which the framework would multiply them now."""
    platform = get_platform()
    dtype = platform.product_dtype(xs[0])
    return [platform.cast(x, dtype) for x in xs]


def _check(x: Tensor, weights: Sequence[Tensor], cut: Cut, length: int, what: str) -> None:
    if not weights:
        raise ValueError(f"{what} needs a weight; to gather alone, redistribute the input")
    if any(is_dtensor(each) for each in (x, *weights)):
        raise ValueError(f"{what} takes this rank's plain tensors, got a DTensor: give to_local() of it")
    if not 0 <= cut.dim < len(x.shape) - 1:
        raise ValueError(
            f"{what}: the cut dim is one of those before the last, from 0; got dim {cut.dim} of an input of shape {tuple(x.shape)}"
        )
    if x.shape[cut.dim] != length:
        raise ValueError(
            f"{what}: dim {cut.dim} of the input is {length} here by the cut {tuple(cut.sizes)}, got shape {tuple(x.shape)}"
        )
    platform = get_platform()
    dtype, dtype_name = platform.product_dtype(x), platform.dtype_name
    for place, weight in enumerate(weights):
        fits = len(weight.shape) == 2 and weight.shape[1] == x.shape[-1]
        if not fits or platform.product_dtype(weight) != dtype:
            raise ValueError(
                f"{what}: weight {place} must be (out, {x.shape[-1]}) of {dtype_name(x.dtype)} for an input of shape "
                f"{tuple(x.shape)}, got {tuple(weight.shape)} of {dtype_name(weight.dtype)}"
            )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What does not change between forward and backward."""

    rows: Matrices
    policy: OverlapPolicy
    num_factors: int
    used: Callable[[], None] | None

    def with_factors(self, number: int) -> _Plan:
        return _Plan(self.rows, self.policy, number, None)


@once
def _functions(platform: Any) -> SimpleNamespace:
    """The autograd Functions of the framework, on factors ``(k, m)`` that may lie transposed.

    A gradient that nobody asked for is None, not zeros, which would be reduced like any other.
    """
    base: Any = platform.Function

    def flipped(factors: Sequence[Tensor]) -> list[Tensor]:
        return [platform.transpose(factor, 0, 1) for factor in factors]

    def as_matrix(x: Tensor) -> Tensor:
        return platform.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))

    def to_factor(x: Tensor, g: Tensor) -> Tensor:
        """``x.T @ g`` of all rows, laid out as ``g.T @ x``: a factor is a weight ``(m, k)`` that was transposed."""
        x, g = as_matrix(x), as_matrix(g)
        return platform.transpose(platform.matmul(platform.transpose(g, 0, 1), x), 0, 1)

    class Gather(base):
        @staticmethod
        def forward(ctx: Any, plan: _Plan, x: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
            ctx.set_materialize_grads(False)
            rows, count = plan.rows, plan.num_factors
            factors, biases = operands[:count], operands[count:]
            whole, products = gather_and_multiply(
                platform.detach(rows.flat(x)), factors, rows, plan.policy, biases or None
            )
            whole = rows.whole(whole)
            ctx.plan = plan
            ctx.save_for_backward(whole, *factors)
            return (*(rows.whole(product) for product in products), whole)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            plan, rows = ctx.plan, ctx.plan.rows
            if plan.used is not None:
                plan.used()
            whole, *factors = ctx.saved_tensors
            products, to_whole = grads[:-1], grads[-1]
            needs_x, needs = ctx.needs_input_grad[1], ctx.needs_input_grad[2:]
            pairs = [(g, f) for g, f in zip(products, factors, strict=True) if g is not None]
            given, used = [g for g, _ in pairs], flipped([f for _, f in pairs])
            to_x: Callable[[], Tensor | None] = lambda: None  # noqa: E731
            if needs_x and platform.is_grad_enabled():
                to_x = recorded(plan, given, used, to_whole)
            elif needs_x and (given or to_whole is not None):
                wait = multiply_and_scatter(
                    [rows.flat(g) for g in given],
                    used,
                    rows,
                    plan.policy,
                    summand=None if to_whole is None else rows.flat(to_whole),
                    has_work_beside=any(needs),
                )
                to_x = lambda: rows.piece(wait())  # noqa: E731
            to_factors = [
                to_factor(whole, g) if g is not None and needed else None
                for g, needed in zip(products, needs, strict=False)
            ]
            to_biases = [
                platform.sum(as_matrix(g), 0) if g is not None and needed else None
                for g, needed in zip(products, needs[len(factors) :], strict=False)
            ]
            return None, to_x(), *to_factors, *to_biases

    def recorded(
        plan: _Plan, grads: list[Tensor], factors: list[Tensor], to_whole: Tensor | None
    ) -> Callable[[], Tensor | None]:
        """The gradient of a gathered piece as differentiable functions."""
        parts = []
        if grads:
            parts.append(Scatter.apply(plan.with_factors(len(grads)), *grads, *factors))
        if to_whole is not None:
            parts.append(conversions.reduce_scatter(to_whole, plan.rows.cut))
        total = sum(parts[1:], parts[0]) if parts else None
        return lambda: total

    class Scatter(base):
        @staticmethod
        def forward(ctx: Any, plan: _Plan, *operands: Tensor) -> Tensor:
            rows, count = plan.rows, plan.num_factors
            xs, factors = operands[:count], operands[count:]
            ctx.plan = plan
            ctx.save_for_backward(*operands)
            flat = [platform.detach(rows.flat(x)) for x in xs]
            return rows.piece(multiply_and_scatter(flat, factors, rows, plan.policy)())

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            plan, rows, count = ctx.plan, ctx.plan.rows, ctx.plan.num_factors
            operands = ctx.saved_tensors  # asked for once: checkpointing frees what it has handed out
            xs, factors = operands[:count], operands[count:]
            needs = ctx.needs_input_grad[1:]
            wanted = [place for place in range(count) if needs[place]]
            used = flipped([factors[place] for place in wanted])
            if platform.is_grad_enabled():
                *products, whole = Gather.apply(plan.with_factors(len(used)), g, *used)
            else:
                whole, products = gather_and_multiply(rows.flat(g), used, rows, plan.policy)
                products, whole = [rows.whole(product) for product in products], rows.whole(whole)
            to_xs: list[Tensor | None] = [None] * count
            for place, product in zip(wanted, products, strict=True):
                to_xs[place] = product
            to_factors = [
                to_factor(x, whole) if needed else None for x, needed in zip(xs, needs[count:], strict=True)
            ]
            return None, *to_xs, *to_factors

    return SimpleNamespace(Gather=Gather, Scatter=Scatter)
