"""Differentiation of MindSpore, on its torch-style engine.

[Note: gradients of leaves] Gathering a gradient, MindSpore clones what another part of the graph also holds (the gradient of
``x + y`` is one tensor for both), and its CPU build has no kernel for that; it would also keep expanded gradients
without memory of their own. So each backward copies what arrives at a leaf, with a hook on the leaf's node that lives as
long as that backward.

[Note: second derivatives] A backward that is recorded (``create_graph``) forgets, in MindSpore 2.10, how the gradients of views, sums and
matrix products depend on what they are made of: a derivative of theirs comes out wrong, and nothing says so; those of softmax
end the process' backward. Only operations on elements are right. So it is refused. A function with a gradient of its own
(:class:`Function`) may compute it as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mindspore
from mindspore import ops

from hp_platform.mindspore import _private
from hp_platform.mindspore._backward_starts import inner, starts_of
from hp_platform.mindspore._dtypes import FLOATING, NAME_OF
from hp_platform.mindspore._private import executor
from hp_platform.mindspore._recording import GradMode, enable_grad, ensure_recording, no_grad


class Function(_private.Function):
    """``forward`` and ``backward`` of one's own; see :class:`hp_platform.protocols.AutogradOps`."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward, recording backward."""
        ensure_recording()
        return super().apply(*args)


class MindSporeAutogradOps:
    """Implements :class:`hp_platform.protocols.AutogradOps`, but for the gradients that leaves hold."""

    Function = Function
    TraceableFunction = Function
    saved_tensors_hooks = mindspore.saved_tensors_hooks

    def no_grad(self) -> GradMode:
        """Nothing inside is recorded."""
        return no_grad()

    def recordable(self) -> GradMode:
        """Nothing inside is recorded; MindSpore knows no other such mode."""
        return no_grad()

    def enable_grad(self) -> GradMode:
        """Recording on again."""
        return enable_grad()

    def is_grad_enabled(self) -> bool:
        """Whether operations are recorded."""
        ensure_recording()
        return executor.enable_grad()

    def requires_grad(self, x: mindspore.Tensor) -> bool:
        """Whether a gradient flows to ``x``."""
        return _private.requires_grad(x)

    def requires_grads(self, xs: Sequence[mindspore.Tensor]) -> list[bool]:
        """Of each."""
        return [_private.requires_grad(x) for x in xs]

    def set_requires_grad_(self, x: mindspore.Tensor, flag: bool) -> mindspore.Tensor:
        """Ask for a leaf's gradient."""
        ensure_recording()
        if flag and NAME_OF.get(x.dtype) not in FLOATING:
            raise ValueError(f"only floating-point tensors have gradients, got dtype {NAME_OF.get(x.dtype)}")
        if not flag and not _private.is_leaf(x):
            raise RuntimeError(
                f"a tensor of shape {tuple(x.shape)} that an operation made requires a gradient because its inputs do; "
                "take it out of the graph with detach"
            )
        if isinstance(x, mindspore.Parameter):
            x.requires_grad = flag
        else:
            x.requires_grad_(flag)
        return x

    def is_leaf(self, x: mindspore.Tensor) -> bool:
        """Whether no recorded operation made ``x``."""
        return _private.is_leaf(x)

    def detach(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """The same memory outside of the graph."""
        return ops.stop_gradient(x)

    def backward(
        self,
        tensors: Sequence[mindspore.Tensor],
        grads: Sequence[mindspore.Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Gradients into the leaves."""
        tensors, grads = inner(tensors, grads)
        starts = starts_of(tensors, grads, "backward", "grads")
        # See [Note: gradients of leaves].
        hooks = [node.register_prehook(_copy_incoming) for node in _private.leaf_nodes(tensors)]
        try:
            _private.run_backward(tuple(tensors), starts, retain_graph, False, (), True, accumulate_grad=True)
        finally:
            for hook in hooks:
                hook.remove()

    def grad(
        self,
        outputs: Sequence[mindspore.Tensor],
        inputs: Sequence[mindspore.Tensor],
        grad_outputs: Sequence[mindspore.Tensor] | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        allow_unused: bool = False,
    ) -> list[mindspore.Tensor | None]:
        """Gradients as values. NotImplementedError for ``create_graph``: see [Note: second derivatives]."""
        if create_graph:
            raise NotImplementedError(
                f"grad(create_graph=True) on mindspore {mindspore.__version__}: gradients of matrix products, sums and views are not "
                f"recorded, so second derivatives would be wrong. Give the second derivative as a formula of its own, or use torch"
            )
        for x in (*outputs, *inputs):
            if _private.keeps_grad(x):
                raise NotImplementedError(
                    f"grad of a {type(x).__name__} on mindspore {mindspore.__version__}: use backward and read the grad of its "
                    "inputs, or parallelize_value_and_grad"
                )
        starts = starts_of(outputs, grad_outputs, "grad", "grad_outputs")
        for place, x in enumerate(inputs):
            if not _private.requires_grad(x):
                raise RuntimeError(f"inputs[{place}] of shape {tuple(x.shape)} does not require a gradient")
        found = list(
            _private.run_backward(
                tuple(outputs),
                starts,
                retain_graph,
                False,
                tuple(inputs),
                True,
                accumulate_grad=False,
            )
        )
        unused = [place for place, value in enumerate(found) if value is None]
        if unused and not allow_unused:
            raise RuntimeError(
                f"inputs {unused} were not used to compute the outputs; pass allow_unused=True to get None for them"
            )
        return found

    def queue_backward_callback(self, callback: Callable[[], None]) -> None:
        """At the end of the running backward."""
        try:
            executor.queue_backward_final_callback(callback)
        except RuntimeError as error:
            raise RuntimeError(
                "queue_backward_callback was called outside of a backward; call it from a hook or Function.backward"
            ) from error

    def is_in_backward(self) -> bool:
        """Whether callbacks are taken."""
        try:
            executor.queue_backward_final_callback(_nothing)
        except RuntimeError:
            return False
        return True

    def autocast_state(self) -> Callable[[], AbstractContextManager[Any]]:
        """MindSpore's casts belong to modules."""
        return nullcontext

    def backward_operation(self) -> str | None:
        """MindSpore's engine tells nobody."""
        return None

    def backward_turn(self, x: mindspore.Tensor) -> int:
        """MindSpore's engine tells nobody."""
        raise _no_turns("backward_turn")

    def set_backward_turn(self, x: mindspore.Tensor, turn: int) -> None:
        """And nobody tells it."""
        raise _no_turns("set_backward_turn")

    def watch_operations(self, run: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
        """MindSpore has no such thing below autograd."""
        raise NotImplementedError(
            f"watch_operations on mindspore {mindspore.__version__}: operations below autograd cannot be watched; ask "
            'supports("operation_dispatch") first'
        )

    def detach_watched(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """Nothing is watched."""
        return self.detach(x)

    def can_be_kept(
        self, operation: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """Nothing is watched."""
        return False

    def is_cast(self, operation: Any) -> bool:
        """Nothing is watched."""
        return False

    def operations_of(self, function: Any) -> frozenset[Any]:
        """Nothing is watched."""
        return frozenset()

    def version(self, x: mindspore.Tensor) -> int:
        """Always 0."""
        return 0

    def versions(self, xs: Sequence[mindspore.Tensor]) -> list[int]:
        """All 0."""
        return [0] * len(xs)

    def counts_writes(self, x: mindspore.Tensor) -> bool:
        """Never."""
        return False

    def uncounted(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """Nothing is counted."""
        return self.detach(x)

    def preserve_version(self, xs: Sequence[mindspore.Tensor]) -> AbstractContextManager[Any]:
        """Writes inside do not count."""
        context: AbstractContextManager[Any] = _private.preserve_version(xs)
        return context


def _nothing() -> None:
    """A callback that only asks whether callbacks are taken."""


def _copy_incoming(grads: tuple[mindspore.Tensor, ...]) -> tuple[mindspore.Tensor, ...]:
    return tuple(None if g is None else g.copy() for g in grads)


def _no_turns(function: str) -> NotImplementedError:
    return NotImplementedError(
        f"{function} on mindspore {mindspore.__version__}: in which order its engine walks a graph is not told and cannot be changed; ask "
        'supports("backward_turns") first'
    )
