"""Gradients that leaves of MindSpore hold, and hooks on gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import ops

from hp_platform.mindspore import _private
from hp_platform.protocols.nn import HookHandle


class MindSporeGradOps:
    """Implements what :class:`hp_platform.protocols.AutogradOps` has for gradients of leaves."""

    def __init__(self) -> None:
        super().__init__()
        # By the leaf's id (tensors compare by element), the object that stood for its gradient last, while somebody holds it.
        self._grads: weakref.WeakValueDictionary[int, mindspore.Tensor] = weakref.WeakValueDictionary()

    def get_grad(self, x: mindspore.Tensor) -> mindspore.Tensor | None:
        """A leaf's gradient so far."""
        if _private.keeps_grad(x):
            return x.grad
        if not _private.is_leaf(x):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} that an operation made keeps no gradient; "
                "ask a leaf, or watch it with register_tensor_hook"
            )
        # MindSpore makes another object each time. What is held keeps its memory, so no other gradient has its address.
        found, known = _private.get_grad(x), self._grads.get(id(x))
        if known is not None and found is not None and known.data_ptr() == found.data_ptr():
            return known
        if found is not None:
            self._grads[id(x)] = found
        return found

    def set_grad(self, x: mindspore.Tensor, grad: mindspore.Tensor | None) -> None:
        """Put a leaf's gradient."""
        if _private.keeps_grad(x):
            x.grad = grad
            return
        if grad is not None and grad.shape != x.shape:
            raise ValueError(
                f"a gradient of shape {tuple(grad.shape)} does not fit a leaf of shape {tuple(x.shape)}"
            )
        _private.set_grad(x, grad)
        if grad is not None:
            self._grads[id(x)] = grad

    def get_grads(self, xs: Sequence[mindspore.Tensor]) -> list[mindspore.Tensor | None]:
        """Of leaves."""
        return [self.get_grad(x) for x in xs]

    def set_grads(self, xs: Sequence[mindspore.Tensor], grads: Sequence[mindspore.Tensor | None]) -> None:
        """Put each."""
        for x, grad in zip(xs, grads, strict=True):
            self.set_grad(x, grad)

    def take_grads(self, xs: Sequence[mindspore.Tensor]) -> list[mindspore.Tensor | None]:
        """Of leaves, which have none after that."""
        found = self.get_grads(xs)
        for x, grad in zip(xs, found, strict=True):
            if grad is not None:
                self.set_grad(x, None)
        return [
            ops.stop_gradient(grad) if grad is not None and _private.requires_grad(grad) else grad
            for grad in found
        ]

    def register_tensor_hook(
        self, x: mindspore.Tensor, hook: Callable[[mindspore.Tensor], mindspore.Tensor | None]
    ) -> HookHandle:
        """``hook(grad)`` in backward."""
        _check_in_graph(x, "register_tensor_hook")
        return x.register_hook(hook)

    def register_post_accumulate_grad_hook(
        self, x: mindspore.Tensor, hook: Callable[[mindspore.Tensor], None]
    ) -> HookHandle:
        """``hook(leaf)`` after its gradient was added to."""
        _check_in_graph(x, "register_post_accumulate_grad_hook")
        if not _private.is_leaf(x):
            raise RuntimeError(
                f"register_post_accumulate_grad_hook: a tensor of shape {tuple(x.shape)} that an operation made gathers "
                "no gradient; ask a leaf, or use register_tensor_hook"
            )
        if _private.keeps_grad(x):
            return x.register_post_accumulate_grad_hook(hook)
        # The leaf holds its node and the node this hook, so the hook must not hold the leaf.
        leaf = weakref.ref(x)

        def gathered(*_: Any) -> None:
            present = leaf()
            if present is not None:
                hook(present)

        return _private.grad_node(x).register_hook(gathered)


def _check_in_graph(x: mindspore.Tensor, function: str) -> None:
    if not _private.requires_grad(x):
        raise RuntimeError(
            f"{function}: the tensor of shape {tuple(x.shape)} does not require a gradient; ask for it with set_requires_grad_"
        )
