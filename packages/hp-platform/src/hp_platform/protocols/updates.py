"""What optimizers do to whole lists of tensors, in as few launches as the framework can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hp_platform.protocols.tensor import DType, Tensor


class UpdateOps(Protocol):
    """Primitives of optimizers. Nothing is recorded; the targets really change on every backend."""

    def adamw_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor],
        *,
        step: int,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        """AdamW's step number ``step`` (from 1) for each; parameters, moments and (AMSGrad) their maxima change in place.

        All tensors are plain and of one dtype on one device, grads of the shapes of params; ``max_exp_avg_sqs`` is empty
        without AMSGrad. ``lr`` may be a tensor of one element; torch computes in its dtype then, but for ``fused`` steps of narrower
        parameters, for which it is float32. With ``g`` the
        gradient (its negative if ``maximize``)::

            p = p (1 - lr weight_decay);  m = m + (g - m)(1 - beta1);  v = beta2 v + (1 - beta2) g g
            p = p - lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^step) + eps)    (AMSGrad: the largest v so far)

        ``fused``: one kernel for all (needs "fused_adamw"); None: where that is quicker, which is on cuda; False: the formula's
        operations one after the other. On the cpu they give the bits of torch.optim.AdamW(foreach=False), on MindSpore those
        of numpy in the tensors' dtype (in float32, rounded at the end, for narrower ones).
        """
        ...

    def momentum_(
        self,
        momenta: Sequence[Tensor],
        grads: Sequence[Tensor],
        directions: Sequence[Tensor],
        *,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """``m = momentum m + g`` of each, rounded twice, and ``d``, which may be narrower, becomes ``momentum m + g`` (``nesterov``) or ``m``.

        One pass over float32 momenta on cuda. Of each shape three tensors on one device; directions may be parts of a larger tensor
        where ``supports("write_into_view")``.
        """
        ...

    def move_(
        self, params: Sequence[Tensor], updates: Sequence[Tensor], *, keep: float, factor: float
    ) -> None:
        """``p = keep p + factor u`` of each; updates may be narrower, and both parts of larger tensors. One pass on cuda."""
        ...

    def move_by_(self, params: Sequence[Tensor], updates: Sequence[Tensor], numbers: Tensor) -> None:
        """:meth:`move_` by ``numbers (2,)``: ``keep`` and ``factor`` in float32 as they are when the device gets there. The same bits for
        params of at most 32 bits.

        The host does not wait where ``supports("numbers_on_device")`` for contiguous float32 params; else it reads them first.
        """
        ...

    def quotient(self, x: Tensor, divisor: Tensor, dtype: DType, *, out: Tensor | None = None) -> Tensor:
        """``x (b, ...)`` by a divisor ``(b, 1, ...)``, in the wider of their dtypes, rounded to ``dtype`` once. One pass on cuda.

        ``out``, here and below: contiguous memory of the result's shape and dtype that becomes the result, and overlaps no operand.
        With the same bits as without; without a copy where ``supports("out_products")``.
        """
        ...

    def matmul_add(
        self,
        add: Tensor,
        x: Tensor,
        y: Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """``beta * add + alpha * (x @ y)`` of batches: ``add (b, n, m)``, ``x (b, n, k)``, ``y (b, k, m)``, all of one dtype; not
        recorded. In one pass where the backend has it (torch: rounded once, at the end); on Hopper GPUs in 16 bits as :meth:`gram`.
        """
        ...

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``x x^T (b, m, m)`` of a batch ``x (b, m, n)`` that may lie turned.

        On Hopper GPUs in 16 bits only its lower triangle is computed where ``m >= 1536``, by a kernel whose result of a matrix does not
        depend on the others; elsewhere it is the framework's product.
        """
        ...

    def square_add(self, x: Tensor, *, alpha: float, beta: float, out: Tensor | None = None) -> Tensor:
        """``alpha x x + beta x`` of a batch ``x (b, m, m)`` of symmetric matrices, rounded once where ``matmul_add`` is; as :meth:`gram`."""
        ...

    def view_base(self, x: Tensor) -> Tensor | None:
        """The tensor that ``x`` is a view of, which is none itself; None for a tensor with memory of its own, and where the
        framework does not tell.
        """
        ...
