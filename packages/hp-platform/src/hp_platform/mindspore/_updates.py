"""Steps of optimizers over lists of tensors, in MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import mint

from hp_platform.mindspore import _matmul
from hp_platform.mindspore._dtypes import NAME_OF, resolve
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._write import exact_number, write

Tensors = Sequence[mindspore.Tensor]


class MindSporeUpdateOps:
    """Implements :class:`hp_platform.protocols.UpdateOps`."""

    matmul: Any
    transpose: Any

    def adamw_(
        self,
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        *,
        step: int,
        lr: Any,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        """One step of AdamW. ``fused`` must not be True: there is no such kernel."""
        if isinstance(lr, mindspore.Tensor):
            lr = float(lr.asnumpy().item())
        factor = -(lr / (1 - beta1**step))
        root = (1 - beta2**step) ** 0.5
        with no_grad():
            for at, p in enumerate(params):
                if p.size == 0:
                    continue
                # Kernels for narrower dtypes are missing; numbers go in as tensors, which are not rounded to float32.
                dtype = p.dtype if NAME_OF[p.dtype] in ("float32", "float64") else mindspore.float32

                def number(value: float, dtype: Any = dtype) -> mindspore.Tensor:
                    return exact_number(value, dtype)

                x, g, m, v = (t.astype(dtype) for t in (p, grads[at], exp_avgs[at], exp_avg_sqs[at]))
                g = -g if maximize else g
                if weight_decay:
                    x = x * number(1 - lr * weight_decay)
                m = m + (g - m) * number(1 - beta1)
                v = v * number(beta2) + g * g * number(1 - beta2)
                write(exp_avgs[at], m)
                write(exp_avg_sqs[at], v)
                if max_exp_avg_sqs:
                    v = mint.maximum(max_exp_avg_sqs[at].astype(dtype), v)
                    write(max_exp_avg_sqs[at], v)
                denominator = mint.sqrt(v) / number(root) + number(eps)
                write(p, x + m * number(factor) / denominator)

    def momentum_(
        self, momenta: Tensors, grads: Tensors, directions: Tensors, *, momentum: float, nesterov: bool
    ) -> None:
        """Momentum, and where a step goes."""
        with no_grad():
            for m, g, direction in zip(momenta, grads, directions, strict=True):
                if m.size:
                    wide = _computed(m)
                    number, given = exact_number(momentum, wide), g.astype(wide)
                    moved = m.astype(wide) * number + given
                    write(m, moved)
                    write(direction, moved * number + given if nesterov else moved)

    def move_(self, params: Tensors, updates: Tensors, *, keep: float, factor: float) -> None:
        """Decay and update."""
        with no_grad():
            for p, u in zip(params, updates, strict=True):
                if p.size:
                    wide = _computed(p)
                    kept = p.astype(wide) * exact_number(keep, wide)
                    write(p, kept + u.astype(wide) * exact_number(factor, wide))

    def move_by_(self, params: Tensors, updates: Tensors, numbers: mindspore.Tensor) -> None:
        """Decay and update by numbers that the host reads."""
        keep, factor = numbers.asnumpy().tolist()
        self.move_(params, updates, keep=keep, factor=factor)

    def quotient(
        self,
        x: mindspore.Tensor,
        divisor: mindspore.Tensor,
        dtype: Any,
        *,
        out: mindspore.Tensor | None = None,
    ) -> mindspore.Tensor:
        """Quotient of rows."""
        wide = _computed(x) if NAME_OF[divisor.dtype] != "float64" else divisor.dtype
        with no_grad():
            return _put((x.astype(wide) / divisor.astype(wide)).astype(resolve(dtype)), out)

    def matmul_add(
        self,
        add: mindspore.Tensor,
        x: mindspore.Tensor,
        y: mindspore.Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: mindspore.Tensor | None = None,
    ) -> mindspore.Tensor:
        """A product of batches and what is added to it."""
        return _put(_matmul.matmul_add(add, x, y, alpha=alpha, beta=beta), out)

    def gram(self, x: mindspore.Tensor, *, out: mindspore.Tensor | None = None) -> mindspore.Tensor:
        """Product with itself."""
        with no_grad():
            return _put(self.matmul(x, self.transpose(x, 1, 2)), out)

    def square_add(
        self, x: mindspore.Tensor, *, alpha: float, beta: float, out: mindspore.Tensor | None = None
    ) -> mindspore.Tensor:
        """Square, and what is added to it."""
        return _put(_matmul.matmul_add(x, x, x, alpha=alpha, beta=beta), out)

    def view_base(self, x: mindspore.Tensor) -> None:
        """Unknown."""
        return


def _put(result: mindspore.Tensor, out: mindspore.Tensor | None) -> mindspore.Tensor:
    """``out`` with the values of the result; without one the result."""
    if out is None:
        return result
    with no_grad():
        write(out, result)
    return out


def _computed(x: mindspore.Tensor) -> Any:
    """Kernels for narrower dtypes are missing."""
    return x.dtype if NAME_OF[x.dtype] in ("float32", "float64") else mindspore.float32
