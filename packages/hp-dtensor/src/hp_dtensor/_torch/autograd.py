"""torch.autograd on DTensors: ``backward`` with its options, ``torch.autograd.backward`` and ``torch.autograd.grad``.

What they are given is unwrapped: the graph is that of the local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor._torch.context import unwrapped
from hp_dtensor.base import DTensorBase
from hp_dtensor.cotangents import gradient_of_dtensor
from hp_dtensor.gradients import GradientMethods
from hp_dtensor.marks import whole_gradient


class AutogradMethods(GradientMethods):
    """Gradients as torch spells them."""

    # The platform gives the same answers; asking the local tensor itself is quicker.
    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    is_leaf = property(lambda x: x._local.is_leaf, doc=GradientMethods.is_leaf.__doc__)
    grad_fn = property(
        lambda x: x._local.grad_fn,
        doc="The node that made the local tensor. Of what redistribute() has gathered, a hook on the node sees a part only: see "
        "[Note: two faces] in hp_dtensor.faces; hooks on the tensor see all.",
    )

    @property
    def output_nr(self) -> int:
        """Which result of ``grad_fn`` it is. torch's get_gradient_edge asks, so the whole gradient passes there from now on."""
        whole_gradient(self, "the gradient edge")
        return self._local.output_nr

    def detach(self) -> Any:
        """The same memory outside of the graph."""
        return self._wrap(self._local.detach(), self._spec)

    def detach_(self) -> Any:
        """Take this tensor itself out of the graph."""
        self._local.detach_()
        self._marks = None
        return self

    def retain_grad(self) -> None:
        """Keep the gradient in ``grad`` though an operation made this tensor."""
        whole_gradient(self, "retain_grad")
        self._local.retain_grad()

    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if gradient is None and not self._spec.shape and self._without_averages() is self:
            local, seed = self._local, None  # torch's own seed of a 0-d tensor is one, too
        else:
            local, seed = self._start_of_backward(gradient)
        torch.autograd.backward(local, seed, retain_graph, create_graph, inputs=_locals_of(inputs))

    backward.__doc__ = GradientMethods.backward.__doc__


def backward(
    tensors: Sequence[Any],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward``."""
    locals_, seeds = _starts(tensors, grad_tensors)
    torch.autograd.backward(locals_, seeds, retain_graph, create_graph, inputs=_locals_of(inputs))


def grad(
    outputs: Sequence[Any], inputs: Sequence[Any], grad_outputs: Any = None, **options: Any
) -> tuple[Any, ...]:
    """``torch.autograd.grad``."""
    if options.get("is_grads_batched"):
        raise NotImplementedError(
            f"torch {torch.__version__}: is_grads_batched runs vmap, which knows no DTensors: call torch.autograd.grad once "
            f"for each gradient"
        )
    locals_, seeds = _starts(outputs, grad_outputs)
    found = torch.autograd.grad(locals_, _locals_of(inputs), seeds, **options)
    return tuple(
        x._wrap(gradient_of_dtensor(g, x._spec), x._spec.grad)
        if g is not None and isinstance(x, DTensorBase)
        else g
        for x, g in zip(inputs, found, strict=True)
    )


def _starts(tensors: Sequence[Any], gradients: Any) -> tuple[list[Any], list[Any]]:
    if gradients is None or isinstance(gradients, torch.Tensor):
        gradients = [gradients] * len(tensors)
    if len(gradients) != len(tensors):
        raise ValueError(
            f"got {len(tensors)} tensors to start backward from and {len(gradients)} gradients: give one each"
        )
    pairs = [
        x._start_of_backward(g) if isinstance(x, GradientMethods) else (x, g)
        for x, g in zip(tensors, gradients, strict=True)
    ]
    return [local for local, _ in pairs], [seed for _, seed in pairs]


def _locals_of(inputs: Any) -> Any:
    for x in [inputs] if isinstance(inputs, torch.Tensor) else inputs or ():
        if isinstance(x, DTensorBase):
            whole_gradient(x, "the gradient")
    if inputs is None or isinstance(inputs, torch.Tensor):
        return unwrapped(inputs)
    return tuple(map(unwrapped, inputs))


HANDLERS: dict[Any, Any] = {torch.autograd.backward: backward, torch.autograd.grad: grad}
"""Functions of torch that are answered here."""
