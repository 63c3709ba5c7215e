"""Foreign autograd Functions on DTensors: their forward and their backward see DTensors.

C++ looks for arguments that require grad without asking ``__torch_function__``, and a DTensor's outer tensor never does: a
``Function.apply(dtensor)`` would drop the gradient without a word. So ``torch.autograd.Function.apply`` is replaced, once per
process, by :func:`install`. Where a DTensor is among the arguments, a Function of ours runs on the local tensors and calls
the user's forward and backward in between. The graph, what is saved in it (also for hooks on saved tensors) and second
derivatives are those of local tensors, as everywhere. Gradients are brought to where their inputs' gradients lie.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hp_dtensor._torch.context import Call, Context, as_tuple, unwrapped
from hp_dtensor._torch.node import Node
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.placements import REPLICATE
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_platform import get_platform

_STORED = inspect.getattr_static(Function, "apply")  # a classmethod, or a descriptor of C
_original: Callable[..., Any] = getattr(_STORED, "__func__", None) or (
    lambda cls, *args, **kwargs: _STORED.__get__(None, cls)(*args, **kwargs)
)
_ONCE = once_differentiable(lambda ctx: None).__code__


def install(tensor_class: type) -> None:
    """Let ``Function.apply`` know DTensors, which are of this class. Plain calls cost one more look at their arguments."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if type(arg) is tensor_class:
                return _on_dtensors(cls, args, kwargs)
        return _original(cls, *args, **kwargs)

    get_platform().run_uncompiled([_on_dtensors])
    apply.__doc__ = Function.apply.__doc__
    Function.apply = classmethod(apply)


def _on_dtensors(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_skipped(cls):
        return on_locals(lambda *local, **rest: _original(cls, *local, **rest), args, kwargs)
    if _has_setup(cls):
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    call = Call(tuple(map(_reduced, args)), kwargs)
    bridge = cls.__dict__.get("_hp_dtensor_bridge")
    if bridge is None:
        bridge = cls._hp_dtensor_bridge = _bridge(cls)
    result = _original(bridge, call, *map(unwrapped, call.args))
    given, call.args, call.kwargs = call.args, (), {}  # the graph holds the call, and must not hold them
    results = [
        x if spec is None else _outer(x, spec, given, call)
        for x, spec in zip(as_tuple(result), call.outputs, strict=True)
    ]
    return tuple(results) if isinstance(result, tuple) else results[0]


def _reduced(x: Any) -> Any:
    """Averages and the like are made whole: what a gradient with respect to one rank's part is, only rules know."""
    if not isinstance(x, DTensorMethods):
        return x
    wanted = [REPLICATE if p.is_partial() and not p.is_partial("sum") else p for p in x.placements]
    return x.redistribute(placements=wanted)


def _outer(x: Any, spec: Any, given: Sequence[Any], call: Call) -> Any:
    # What was written in place comes back as the same object.
    same = (d for d in given if isinstance(d, DTensorMethods) and d._local is x and d._spec is spec)
    found = next(same, None)
    return call.wrap(x, spec) if found is None else found


def _bridge(cls: Any) -> Any:
    """The Function on local tensors that stands for a user's one. It has its name: torch's module hooks look for theirs."""
    users_backward = _backward_of(cls)
    is_once = getattr(users_backward, "__code__", None) is _ONCE
    if is_once:
        users_backward = users_backward.__wrapped__

    def forward(ctx: Any, call: Call, *_: Any) -> Any:
        ctx._hp_call, context = call, Context(ctx, call)
        if _has_setup(cls):
            result = cls.forward(*call.args, **call.kwargs)
            cls.setup_context(context, call.args, result)
        else:
            result = cls.forward(context, *call.args, **call.kwargs)
        call.set_outputs(as_tuple(result))
        return tuple(map(unwrapped, result)) if isinstance(result, tuple) else unwrapped(result)

    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx._hp_call
        found = as_tuple(users_backward(Context(ctx, call), *call.gradients_of_outputs(grads)))
        return None, *call.local_gradients(found, ctx.needs_input_grad[1:], cls.__name__)

    backward = once_differentiable(backward) if is_once else backward
    bridge = type(Function)(
        cls.__name__, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    node: Any = bridge._backward_cls
    bridge._backward_cls = type(node.__name__, (Node, node), {})
    return bridge


def _backward_of(cls: Any) -> Any:
    return cls.vjp if cls.vjp is not Function.vjp else cls.backward


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not Function.setup_context
