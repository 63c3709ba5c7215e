"""Gradients of DTensors: leaves, ``grad``, backward and hooks. See [Note: how gradients are counted] in :mod:`conversions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hp_dtensor.base import DTensorBase
from hp_dtensor.cotangents import gradient_for_local, gradient_of_dtensor
from hp_dtensor.marks import whole_gradient
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement
from hp_dtensor.spec import Spec, make_spec, shown
from hp_platform import get_platform

if TYPE_CHECKING:
    from hp_platform.protocols.nn import HookHandle

Tensor = Any


HOOK_KEEPER = "_hp_hook_keeper"
"""Attribute of a parameter whose ``grad`` is set by a runtime, not by autograd: who takes its hooks (``add(hook)`` returns a handle)
and calls them."""


class GradientMethods(DTensorBase):
    """What DTensors share with the frameworks' tensors where gradients are concerned."""

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return get_platform().requires_grad(self._local)

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Ask for the gradient of a leaf, or stop asking. ValueError for a Partial: its gradient would not lie as it does."""
        if requires_grad and any(isinstance(p, Partial) for p in self._spec.placements):
            raise ValueError(
                f"a leaf with placements {shown(self._spec.placements)} cannot be trained: its gradient is Replicate. "
                f"Redistribute it to Shard or Replicate first"
            )
        get_platform().set_requires_grad_(self._local, requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made it."""
        return get_platform().is_leaf(self._local)

    @property
    def grad(self) -> Any:
        """The gradient gathered so far, a DTensor: placed as this one; Replicate where this one is a sum, and a sum where it
        is an average, maximum or minimum. RuntimeError where it is a product: each rank's factor has a gradient of its own.
        """
        gradient = get_platform().get_grad(self._local)
        known = self._grad_dtensor
        if known is not None and known._local is gradient:  # optimizers ask several times a step
            return known
        if gradient is not None and any(p.is_partial("prod") for p in self._spec.placements):
            raise RuntimeError(
                f"grad of {shown(self._spec.placements)}: the factors of a product have each their own gradient, which no "
                f"placement describes: read it at to_local()"
            )
        if gradient is None:
            self._grad_dtensor = None
        elif self._grad_dtensor is None or not _is_same(self._grad_dtensor._local, gradient):
            self._grad_dtensor = self._wrap(gradient, self._spec.grad)
        return self._grad_dtensor

    @grad.setter
    def grad(self, value: Any) -> None:
        wanted = self._spec.grad
        if isinstance(value, DTensorBase) and value._spec is not wanted:
            found = value._spec
            if (found.mesh, found.placements, found.shape) == (wanted.mesh, wanted.placements, wanted.shape):
                value = self._wrap(value._local, wanted)  # on an equal mesh that was made another time
        if value is not None and not (isinstance(value, DTensorBase) and value._spec is wanted):
            raise ValueError(f"the gradient must be a DTensor of {wanted}, or None; got {value!r}")
        get_platform().set_grad(self._local, None if value is None else value._local)
        self._grad_dtensor = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def backward(self, gradient: Any = None, retain_graph: bool | None = False) -> None:
        """Add the gradients of the unsharded program to the leaves. Nobody scales by the number of ranks.

        ``gradient`` None: one, for tensors with one element (ValueError otherwise). Else a DTensor of this shape, or a plain
        tensor with the whole gradient. Communication: what the operations' backwards need. All ranks of the mesh call.
        """
        local, seed = self._start_of_backward(gradient)
        get_platform().backward([local], [seed], retain_graph=bool(retain_graph))

    def _start_of_backward(self, gradient: Any = None) -> tuple[Tensor, Tensor]:
        """Where a backward of this tensor starts in the graph of local tensors, and with which local gradient."""
        x, platform = self._without_averages(), get_platform()
        if gradient is None:
            if self.numel() != 1:
                raise ValueError(
                    f"backward of a DTensor of shape {self._spec.shape} needs its gradient: reduce it to one element, or "
                    f"give gradient="
                )
            device = platform.device_of(x._local)
            return x._local, platform.full(x._spec.local_shape, 1, dtype=x._local.dtype, device=device)
        if not isinstance(gradient, DTensorBase):
            whole = make_spec(x._spec.mesh, (REPLICATE,) * len(x._spec.placements), gradient.shape)
            gradient = self._wrap(gradient, whole)
        if gradient._spec.shape != self._spec.shape:
            raise ValueError(
                f"gradient has shape {gradient._spec.shape}, the tensor {self._spec.shape}: they must be equal"
            )
        seed = gradient.redistribute(placements=x._spec.grad.placements)._local
        return x._local, gradient_for_local(seed, x._spec)

    def _without_averages(self) -> Any:
        """Averages made sums, other reductions made whole.

        The seed of an average would have to be cut by the number of ranks; that of a sum is the gradient itself.
        """
        wanted = tuple(map(_sum_or_whole, self._spec.placements))
        return self if wanted == self._spec.placements else self.redistribute(placements=wanted)

    def detach(self) -> Any:
        """The same memory outside of the graph."""
        return self._wrap(get_platform().detach(self._local), self._spec)

    def register_hook(self, hook: Callable[[Any], Any]) -> HookHandle:
        """``hook(gradient)`` once in each backward, with the complete gradient as a DTensor, placed as ``grad`` is.

        It may return another one, a DTensor in any placements. The handle's ``remove()`` takes the hook away.
        """
        whole_gradient(self, "register_hook")
        if getattr(self, HOOK_KEEPER, None) is not None:
            raise RuntimeError(
                "register_hook: the gradient of this parameter does not come by autograd, but by a reduction of the runtime that "
                "sharded it; register_post_accumulate_grad_hook is called behind that, and may change .grad in place"
            )
        spec, wrap = self._spec, self._wrap

        def on_dtensor(gradient: Tensor) -> Tensor | None:
            given = wrap(gradient_of_dtensor(gradient, spec), spec.grad)
            return local_gradient(hook(given), spec, "the gradient that a hook returns")

        return get_platform().register_tensor_hook(self._local, on_dtensor)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> HookHandle:
        """``hook(leaf)``, with this DTensor, after a backward has added to its ``grad``. Of leaves only."""
        keeper = getattr(self, HOOK_KEEPER, None)
        if keeper is not None:
            return keeper.add(hook)

        # The tensor itself, not a weak reference to it, which would forbid torch to swap it.
        def on_dtensor(_: Tensor) -> None:
            hook(self)

        return get_platform().register_post_accumulate_grad_hook(self._local, on_dtensor)


def local_gradient(gradient: Any, spec: Spec, what: str) -> Tensor | None:
    """A gradient that the user's code gave for a DTensor of ``spec``, for the graph of local tensors. ValueError if it is none."""
    if gradient is None:
        return None
    if not isinstance(gradient, DTensorBase) or gradient._spec.shape != spec.shape:
        raise ValueError(
            f"{what} must be a DTensor of shape {spec.shape}, in any placements; got {gradient!r}"
        )
    return gradient_for_local(gradient.redistribute(placements=spec.grad.placements)._local, spec)


def _sum_or_whole(placement: Placement) -> Placement:
    if not isinstance(placement, Partial) or placement == PARTIAL:
        return placement
    return PARTIAL if placement.is_partial("avg") else REPLICATE


def _is_same(known: Tensor, gradient: Tensor) -> bool:
    # MindSpore makes a new object around the same memory each time; the known one keeps that memory from being reused.
    data_ptr = get_platform().data_ptr
    return known is gradient or (known.shape == gradient.shape and data_ptr(known) == data_ptr(gradient))
