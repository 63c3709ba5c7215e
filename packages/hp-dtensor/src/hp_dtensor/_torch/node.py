"""The node of a foreign Function on DTensors in the graph of local tensors: see :mod:`hp_dtensor._torch.bridge`.

It is also the ``ctx`` of forward and backward. Who meets it outside of these sees DTensors, as the Function does: hooks, and
torch's checkpointing, which in some versions keeps the inputs of a region by a Function and takes them from its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor._torch.context import Call, as_tuple


class Node:
    """Goes before the class of node that torch made for a Function of ours."""

    @property
    def saved_tensors(self: Any) -> tuple[Any, ...]:
        """DTensors again, of the local tensors that the graph holds."""
        call: Call = self._hp_call
        return call.saved_again(super().saved_tensors)  # type: ignore[misc]

    def register_hook(self: Any, hook: Callable[..., Any]) -> Any:
        """``hook(grad_inputs, grad_outputs)`` after this node's backward."""
        call: Call = self._hp_call

        def on_dtensors(grad_inputs: Any, grad_outputs: Any) -> Any:
            result = hook(call.gradients_of_inputs(grad_inputs), call.gradients_of_outputs(grad_outputs))
            return None if result is None else call.local_gradients_of_hook(as_tuple(result), call.of_tensors)

        return super().register_hook(on_dtensors)  # type: ignore[misc]

    def register_prehook(self: Any, hook: Callable[..., Any]) -> Any:
        """``hook(grad_outputs)`` before this node's backward."""
        call: Call = self._hp_call

        def on_dtensors(grad_outputs: Any) -> Any:
            result = hook(call.gradients_of_outputs(grad_outputs))
            return None if result is None else call.local_gradients_of_hook(as_tuple(result), call.outputs)

        return super().register_prehook(on_dtensors)  # type: ignore[misc]
