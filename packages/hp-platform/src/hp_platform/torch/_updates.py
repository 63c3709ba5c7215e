"""Steps of optimizers over lists of tensors, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hp_platform.torch._dtypes import resolve
from hp_platform.torch._versions import count_writes, version_before
from hp_platform.torch.device import TorchDevice

Tensors = Sequence[torch.Tensor]


class TorchUpdateOps:
    """Implements :class:`hp_platform.protocols.UpdateOps`."""

    _devices: dict[str, TorchDevice]

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
        """One step of AdamW."""
        if not params:
            return
        if isinstance(lr, torch.Tensor):
            lr = lr.reshape(())  # lists take no number of another shape
        before = version_before(params)
        with torch.no_grad():
            if params[0].is_cuda if fused is None else fused:
                # The kernel of cuda refuses lists whose strides differ, as those of tensors without elements may. That of the cpu
                # does not look at strides.
                some = [at for at, p in enumerate(params) if p.numel()]
                lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
                p, *given = ([xs[at] for at in some] if xs else [] for xs in lists)
                if some:
                    count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
                    numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "maximize": maximize}
                    numbers["amsgrad"] = len(given[-1]) > 0
                    laid = [[_laid_out_as(x, param) for x, param in zip(xs, p, strict=False)] for xs in given]
                    g, m, v, tops = laid
                    _fused(p, g, m, v, tops, [count] * len(p), lr, weight_decay, numbers)
                    for xs, copies in zip(given[1:], laid[1:], strict=True):
                        for x, copied in zip(xs, copies, strict=True):
                            if copied is not x:
                                x.copy_(copied)
            else:
                # The operations of torch.optim.AdamW(foreach=False) in their order, each over the whole list. A tensor of a
                # learning rate stays one, and is read at the end only.
                if maximize:
                    grads = torch._foreach_neg(grads)
                if weight_decay:
                    _scale(params, 1 - lr * weight_decay)
                torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
                _scale(exp_avg_sqs, beta2)
                torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
                seconds = exp_avg_sqs
                if max_exp_avg_sqs:
                    torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
                    seconds = max_exp_avg_sqs
                denominators = torch._foreach_sqrt(seconds)
                torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
                torch._foreach_add_(denominators, eps)
                torch._foreach_addcdiv_(params, exp_avgs, denominators, -float(lr / (1 - beta1**step)))
        count_writes(params, before)

    def momentum_(
        self, momenta: Tensors, grads: Tensors, directions: Tensors, *, momentum: float, nesterov: bool
    ) -> None:
        """Momentum, and where a step goes."""
        kernels = self._kernels(momenta)
        with torch.no_grad():
            rest = list(zip(momenta, grads, directions, strict=True))
            if kernels is not None:
                rest = kernels.momentum(rest, momentum, nesterov=nesterov)
            if not rest:
                return
            moved, given = [m for m, _, _ in rest], [g for _, g, _ in rest]
            _scale(moved, momentum)
            torch._foreach_add_(moved, given)
            if nesterov:
                moved = [torch.clone(m) for m in moved]
                _scale(moved, momentum)
                torch._foreach_add_(moved, given)
            torch._foreach_copy_([d for _, _, d in rest], moved)

    def move_(self, params: Tensors, updates: Tensors, *, keep: float, factor: float) -> None:
        """Decay and update."""
        kernels = self._kernels(params)
        before = [version_before((p,)) for p in params]
        with torch.no_grad():
            rest = list(zip(params, updates, strict=True))
            if kernels is not None:
                rest = kernels.move(rest, keep, factor)
            if rest:
                moved = [p for p, _ in rest]
                if keep != 1.0:
                    _scale(moved, keep)
                torch._foreach_add_(moved, [u for _, u in rest], alpha=factor)
        for p, version in zip(params, before, strict=True):  # kernels of our own count nothing either
            count_writes((p,), version)

    def move_by_(self, params: Tensors, updates: Tensors, numbers: torch.Tensor) -> None:
        """Decay and update by numbers on the device."""
        kernels = self._kernels(params)
        with torch.no_grad():
            rest = list(zip(params, updates, strict=True))
            if kernels is not None:
                rest = kernels.move_by(rest, numbers)
            if rest:
                keep, factor = numbers.tolist()
                self.move_([p for p, _ in rest], [u for _, u in rest], keep=keep, factor=factor)

    def quotient(
        self, x: torch.Tensor, divisor: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Quotient of rows."""
        kernels = self._kernels((x,))
        with torch.no_grad():
            if kernels is not None:
                found = torch.empty(x.shape, dtype=resolve(dtype), device=x.device) if out is None else out
                if kernels.quotient(x, divisor, found):
                    return found
            # Computed in the wider dtype, and rounded on the way to ``out``.
            return (x / divisor).to(resolve(dtype)) if out is None else torch.div(x, divisor, out=out)

    def matmul_add(
        self,
        add: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A product of batches and what is added to it, by one kernel."""
        kernels = self._kernels((x,))
        with _plain(x):
            found = None if kernels is None else kernels.products.matmul_add(add, x, y, alpha, beta, out)
            return torch.baddbmm(add, x, y, beta=beta, alpha=alpha, out=out) if found is None else found

    def gram(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Product with itself."""
        kernels = self._kernels((x,))
        with _plain(x):
            found = None if kernels is None else kernels.products.gram(x, out)
            return torch.bmm(x, x.transpose(1, 2), out=out) if found is None else found

    def square_add(
        self, x: torch.Tensor, *, alpha: float, beta: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Square, and what is added to it."""
        kernels = self._kernels((x,))
        with _plain(x):
            found = None if kernels is None else kernels.products.square_add(x, alpha, beta, out)
            return torch.baddbmm(x, x, x, alpha=alpha, beta=beta, out=out) if found is None else found

    def _kernels(self, xs: Tensors) -> Any:
        return self._devices[xs[0].device.type].fused_updates() if xs else None

    def view_base(self, x: torch.Tensor) -> torch.Tensor | None:
        """The base of a view."""
        return x._base


def _fused(
    p: Tensors,
    g: Tensors,
    m: Tensors,
    v: Tensors,
    tops: Tensors,
    counts: Tensors,
    lr: Any,
    weight_decay: float,
    numbers: dict[str, Any],
) -> None:
    """One launch; with a float64 learning rate on the device beside float64 parameters four.

    The kernel reads a rate on the device as float32. That is exact enough for parameters of at most as many bits; for others
    it makes the step of a rate of 1, which is scaled.
    """
    is_tensor = isinstance(lr, torch.Tensor)
    if is_tensor and not lr.is_cpu and lr.dtype != torch.float32:
        if p[0].dtype == torch.float64:
            steps = [torch.zeros_like(x) for x in p]
            torch._fused_adamw_(steps, g, m, v, tops, counts, lr=1.0, weight_decay=0.0, **numbers)
            lr = lr.to(torch.float64)
            if weight_decay:
                torch._foreach_mul_(p, 1 - lr * weight_decay)
            torch._foreach_mul_(steps, lr)
            torch._foreach_add_(p, steps)
            return
        lr = lr.to(torch.float32)
    torch._fused_adamw_(p, g, m, v, tops, counts, lr=lr, weight_decay=weight_decay, **numbers)


@contextmanager
def _plain(x: torch.Tensor) -> Iterator[None]:
    """Nothing is recorded or cast. Contexts cost more than a launch: they are entered only where they change something."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            yield
    else:
        yield


def _laid_out_as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``x`` with the strides of ``like``; itself if it has them."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _scale(xs: Tensors, factor: Any) -> None:
    """Multiply each by a number. In narrow dtypes the function for lists rounds the number first, ``mul_`` does not."""
    if xs[0].dtype.itemsize >= 4:
        torch._foreach_mul_(xs, factor)
        return
    for x in xs:
        x.mul_(factor)
