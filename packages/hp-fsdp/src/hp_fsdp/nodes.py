"""The nodes that a unit puts into the graph, to be told by backward; see :mod:`hp_fsdp.hooks`."""

from __future__ import annotations

from typing import Any

from hp_fsdp.states import Uses
from hp_fsdp.unit import Unit
from hp_platform.platform import Platform


def inputs_node(platform: Platform, unit: Unit) -> Any:
    """The Function whose backward runs when all gradients of a call's inputs are known."""

    def forward(ctx: Any, uses: Uses, *inputs: Any) -> tuple:
        ctx.uses = uses
        # What the module does not use gets no gradient, and not zeros: what is before it may be used by nobody.
        ctx.set_materialize_grads(False)
        return inputs

    def backward(ctx: Any, *gradients: Any) -> tuple:
        unit.after_backward(ctx.uses)
        return (None, *gradients)

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    # What it is given are local tensors: nobody has to look for others.
    return type("InputsOfUnit", (platform.TraceableFunction,), parts)


def output_node(platform: Platform, device: str) -> Any:
    """The Function that puts an output behind an input in the graph, without a gradient for it: see [Note: outputs of skipped units]."""
    walks_on = platform.supports("undefined_gradients", device)

    def forward(ctx: Any, before: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.before = None if walks_on else platform.detach(before)
        return platform.detach(x)

    def backward(ctx: Any, gradient: Any) -> tuple:
        return None if ctx.before is None else platform.zeros_like(ctx.before), None

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("OutputOfUnit", (platform.Function,), parts)
