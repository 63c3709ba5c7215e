"""What a foreign autograd Function on DTensors knows of its call, and the ``ctx`` that it is given: see :mod:`hp_dtensor._torch.bridge`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.cotangents import gradient_of_dtensor
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.gradients import local_gradient


def unwrapped(x: Any) -> Any:
    """The local tensor of a DTensor; anything else as it is."""
    return x._local if isinstance(x, DTensorMethods) else x


def as_tuple(x: Any) -> tuple[Any, ...]:
    """One result or several, as a tuple."""
    return x if isinstance(x, tuple) else (x,)


def spec_of(x: Any) -> Any:
    """The spec of a DTensor; None of anything else."""
    return x._spec if isinstance(x, DTensorMethods) else None


class Call:
    """One call of a foreign Function: where its inputs, outputs and saved tensors lie (None for what is no DTensor)."""

    __slots__ = ("args", "inputs", "kwargs", "of_tensors", "outputs", "saved", "wrap")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.wrap = next(x for x in args if isinstance(x, DTensorMethods))._wrap
        self.inputs = tuple(map(spec_of, args))
        self.of_tensors = tuple(spec_of(x) for x in args if isinstance(x, torch.Tensor))
        """Of the inputs that are tensors at all: hooks of nodes see the gradients of those."""
        self.outputs: tuple[Any, ...] = ()
        self.saved: tuple[Any, ...] = ()

    def set_outputs(self, results: tuple[Any, ...]) -> None:
        """Note where the results of forward lie."""
        self.outputs = tuple(map(spec_of, results))

    def gradients_of_outputs(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        """DTensors of the local gradients that arrive."""
        return self._wrapped(grads, self.outputs)

    def gradients_of_inputs(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        """DTensors of the local gradients that leave."""
        return self._wrapped(grads, self.of_tensors)

    def local_gradients(self, grads: tuple[Any, ...], needed: Sequence[bool], giver: str) -> tuple[Any, ...]:
        """What the user's backward gave, as local tensors that lie as the inputs' gradients must."""
        if any(g is not None for g in grads[len(self.inputs) :]):
            raise ValueError(
                f"backward of {giver} returned {len(grads)} gradients for {len(self.inputs)} inputs: give one each"
            )
        grads = (*grads, *(None,) * (len(self.inputs) - len(grads)))
        return tuple(
            _local_gradient(g, spec, f"the gradient of input {i} by {giver}") if wanted else None
            for i, (g, spec, wanted) in enumerate(zip(grads, self.inputs, needed, strict=False))
        )

    def local_gradients_of_hook(self, grads: tuple[Any, ...], specs: Sequence[Any]) -> tuple[Any, ...]:
        """The same for what a hook makes of gradients."""
        return tuple(
            _local_gradient(g, spec, f"gradient {i} by a hook")
            for i, (g, spec) in enumerate(zip(grads, specs, strict=True))
        )

    def saved_again(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """DTensors of the local tensors that were saved."""
        return tuple(
            x if spec is None else self.wrap(x, spec) for x, spec in zip(tensors, self.saved, strict=True)
        )

    def _wrapped(self, grads: Sequence[Any], specs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            g if g is None or spec is None else self.wrap(gradient_of_dtensor(g, spec), spec.grad)
            for g, spec in zip(grads, specs, strict=True)
        )


def _local_gradient(gradient: Any, spec: Any, what: str) -> Any:
    if spec is not None:
        return local_gradient(gradient, spec, what)
    if isinstance(gradient, DTensorMethods):
        raise ValueError(
            f"{what}, which is a plain tensor, is a DTensor: give its to_local() or full_tensor()"
        )
    return gradient


class Context:
    """torch's own ``ctx``, but that tensors go in and come out as DTensors."""

    def __init__(self, ctx: Any, call: Call) -> None:
        self.__dict__.update(_ctx=ctx, _call=call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Of the user's inputs; the Function below has one more."""
        return self._ctx.needs_input_grad[1:]

    def save_for_backward(self, *tensors: Any) -> None:
        """Saves local tensors; ``saved_tensors`` of the node makes them DTensors again."""
        self._call.saved = tuple(map(spec_of, tensors))
        self._ctx.save_for_backward(*map(unwrapped, tensors))

    def mark_dirty(self, *tensors: Any) -> None:
        """Inputs that forward wrote."""
        self._ctx.mark_dirty(*map(unwrapped, tensors))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Outputs without gradient."""
        self._ctx.mark_non_differentiable(*map(unwrapped, tensors))
