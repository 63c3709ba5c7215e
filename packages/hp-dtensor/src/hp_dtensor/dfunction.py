"""``DFunction``: an autograd Function of one's own that takes DTensors. Importing this module chooses the framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hp_dtensor.module_tensors import is_dtensor, suggestion
from hp_dtensor.native import dispatch
from hp_dtensor.nest import leaves
from hp_dtensor.rules import RULES, Rule
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_platform import _process, get_platform

if TYPE_CHECKING:
    _Function = Any
else:
    _Function = get_platform().Function


class DFunction(_Function):
    """An autograd Function whose ``forward`` and ``backward`` are written for local tensors, and that DTensors may be given to.

    A subclass names its rule, which says how inputs must lie and how the results then do; the same rules serve the
    framework's own operations (:func:`hp_dtensor.rules.rule`)::

        @rule("scaled_sum", params=("input", "scale"))
        def scaled_sum(x, scale):  # a Spec for each DTensor
            return Outcome(inputs=(x.placements,), output=..., shape=())


        class ScaledSum(DFunction):
            _op_name = "scaled_sum"

            @staticmethod
            def forward(ctx, x, scale): ...  # x is this rank's piece

            @staticmethod
            def backward(ctx, g): ...  # the gradient of the local results, returns those of the local inputs

    ``ScaledSum.apply(x, 2.0)`` without DTensors is the ordinary Function. With DTensors, also in lists, the rule is asked once
    per kind of call, inputs are redistributed as it wishes, ``forward`` runs on local tensors, and the results are wrapped.
    Arguments may be given by the names that ``forward`` has for them.

    Gradients: nobody reduces by hand. Where an input is Replicate along a mesh dim and a result is not (a Shard, a Partial),
    each rank's ``backward`` gives a summand, and they are summed. The gradient of a Partial result is Replicate.
    On a rank whose result has no elements ``backward`` is not called: all inputs get zeros.

    Communication: what the redistribution of the inputs needs, in backward its adjoint and the sums. ValueError if a
    DTensor meets a subclass without ``_op_name``, and what the rule refuses; RuntimeError if there is no rule of that name.
    """

    _op_name: str | None = None
    """Name of the rule."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the function. See the class."""
        args = _by_position(cls, args, kwargs)
        if not any(is_dtensor(x) for x in leaves(args)):
            return super().apply(*args)
        run = _runner(cls)
        if _process.open_modes.count and is_skipped(run, cls._op_name):
            return on_locals(run, args, None)
        return dispatch(_rule_of(cls, run), run, args, None)


def _by_position(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if not kwargs:
        return args
    try:
        bound = inspect.signature(cls.forward).bind(None, *args, **kwargs)  # None for ctx
    except TypeError as error:
        raise ValueError(f"{cls.__qualname__}.apply: {error}") from error
    if bound.kwargs:
        raise ValueError(
            f"{cls.__qualname__}.forward takes {', '.join(bound.kwargs)} by keyword only; autograd Functions take all by "
            f"position: remove the * from its signature"
        )
    return bound.args[1:]


def _runner(cls: Any) -> Callable[..., Any]:
    """The ordinary ``apply`` of a subclass as a function with the subclass's name; made once."""
    found: Callable[..., Any] | None = cls.__dict__.get("_run_on_locals")
    if found is None:
        ordinary = super(DFunction, cls).apply

        def run(*args: Any) -> Any:
            return ordinary(*args)

        run.__name__, run.__qualname__ = cls.__name__, cls.__qualname__
        cls._run_on_locals = found = staticmethod(run)
    return found.__func__ if isinstance(found, staticmethod) else found


def _rule_of(cls: Any, run: Callable[..., Any]) -> Rule:
    """The subclass's own copy of its rule: plans may hold the function, so two subclasses share none."""
    name = cls._op_name
    if name is None:
        raise ValueError(
            f"{cls.__qualname__} got a DTensor, but has no _op_name: set it to the name of a rule (hp_dtensor.rules.rule)"
        )
    found = RULES.get(name)
    if found is None:
        raise RuntimeError(
            f"{cls.__qualname__}._op_name = {name!r} names no rule: enter one with @rule({name!r}) before the first call; "
            f"{suggestion(name, RULES)}"
        )
    known = cls.__dict__.get("_own_rule")
    if known is None or known[0] is not found:
        cls._own_rule = known = (found, replace(found))
    own: Rule = known[1]
    return own
