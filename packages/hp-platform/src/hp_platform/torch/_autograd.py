"""Differentiation of PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_platform.protocols.nn import HookHandle
from hp_platform.torch._operations import can_be_kept, operations_of


class TraceableFunction(torch.autograd.Function):
    """Has torch's own ``apply``, which dynamo knows, also after another one was put in its place."""

    apply = inspect.getattr_static(torch.autograd.Function, "apply")


class TorchAutogradOps:
    """Implements :class:`hp_platform.protocols.AutogradOps`."""

    Function = torch.autograd.Function
    TraceableFunction = TraceableFunction
    no_grad = torch.no_grad
    enable_grad = torch.enable_grad
    is_grad_enabled = staticmethod(torch.is_grad_enabled)
    saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
    detach = staticmethod(torch.Tensor.detach)

    def recordable(self) -> AbstractContextManager[Any]:
        """Outside of inference mode, without recording."""
        return _outside_of_inference() if torch.is_inference_mode_enabled() else torch.no_grad()

    def requires_grad(self, x: torch.Tensor) -> bool:
        """Whether a gradient flows to ``x``."""
        return x.requires_grad

    def requires_grads(self, xs: Sequence[torch.Tensor]) -> list[bool]:
        """Of each."""
        return [x.requires_grad for x in xs]

    def set_requires_grad_(self, x: torch.Tensor, flag: bool) -> torch.Tensor:
        """Ask for a leaf's gradient."""
        return x.requires_grad_(flag)

    def is_leaf(self, x: torch.Tensor) -> bool:
        """Whether no recorded operation made ``x``."""
        return x.is_leaf

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Gradients into the leaves."""
        if grads is None:
            _check_scalars(tensors, "backward", "grads")
        torch.autograd.backward(
            list(tensors), None if grads is None else list(grads), retain_graph=retain_graph
        )

    def grad(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor] | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        allow_unused: bool = False,
    ) -> list[torch.Tensor | None]:
        """Gradients as values."""
        if grad_outputs is None:
            _check_scalars(outputs, "grad", "grad_outputs")
        # create_graph alone keeps the graph in torch (retain_graph=None); False would free it under the new one.
        keep = True if retain_graph or create_graph else None
        return list(
            torch.autograd.grad(
                list(outputs),
                list(inputs),
                grad_outputs,
                retain_graph=keep,
                create_graph=create_graph,
                allow_unused=allow_unused,
            )
        )

    def get_grad(self, x: torch.Tensor) -> torch.Tensor | None:
        """A leaf's gradient so far."""
        if not (x.is_leaf or x.retains_grad):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} that an operation made keeps no gradient; "
                "ask a leaf, or watch it with register_tensor_hook"
            )
        return x.grad

    def set_grad(self, x: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Put a leaf's gradient."""
        x.grad = grad

    def get_grads(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Of leaves."""
        return [x.grad for x in xs]

    def set_grads(self, xs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Put each."""
        for x, grad in zip(xs, grads, strict=True):
            x.grad = grad

    def take_grads(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Of leaves, which have none after that."""
        found = []
        for x in xs:
            grad = x.grad
            if grad is not None:
                x.grad = None
                grad = grad.detach() if grad.requires_grad else grad  # of a backward that records
            found.append(grad)
        return found

    def register_tensor_hook(
        self, x: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> HookHandle:
        """``hook(grad)`` in backward."""
        return x.register_hook(hook)

    def register_post_accumulate_grad_hook(
        self, x: torch.Tensor, hook: Callable[[torch.Tensor], None]
    ) -> HookHandle:
        """``hook(leaf)`` after its gradient was added to."""
        return x.register_post_accumulate_grad_hook(hook)

    def queue_backward_callback(self, callback: Callable[[], None]) -> None:
        """At the end of the running backward."""
        # -1 means "no graph is being walked by this thread"; torch's own error for that names none of our functions.
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "queue_backward_callback was called outside of a backward; call it from a hook or Function.backward"
            )
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def is_in_backward(self) -> bool:
        """Whether this thread walks a graph."""
        return bool(torch._C._current_graph_task_id() != -1)

    def backward_operation(self) -> str | None:
        """The name of the node, which torch has named for what made it."""
        node = torch._C._current_autograd_node()
        return None if node is None else str(node.name())

    def backward_turn(self, x: torch.Tensor) -> int:
        """Its node's sequence number, which counts the nodes that this thread has made."""
        return int(_node(x)._sequence_nr())

    def set_backward_turn(self, x: torch.Tensor, turn: int) -> None:
        """Another sequence number."""
        _node(x)._set_sequence_nr(turn)

    def autocast_state(self) -> Callable[[], AbstractContextManager[Any]]:
        """Of the cpu and of the machine's accelerator."""
        kinds = {"cpu"}
        if torch.accelerator.is_available():
            kinds.add(torch.accelerator.current_accelerator().type)
        states = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)
        ]
        caches = torch.is_autocast_cache_enabled()
        return lambda: _casting(states, caches)

    def watch_operations(self, run: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
        """By a dispatch mode."""
        return _Watch(run)

    def detach_watched(self, x: torch.Tensor) -> torch.Tensor:
        """With the dispatch key that shares version counters, which is left out below autograd."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return x.detach()

    def can_be_kept(
        self, operation: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """By its schema, tags and name, and by what attention drops."""
        return can_be_kept(operation, args, kwargs or {})

    def is_cast(self, operation: Any) -> bool:
        """What ``to`` ends in."""
        return bool(operation is torch.ops.aten._to_copy.default)

    def operations_of(self, function: Any) -> frozenset[Any]:
        """Overloads."""
        return operations_of(function)

    def version(self, x: torch.Tensor) -> int:
        """Number of in-place writes."""
        return x._version

    def versions(self, xs: Sequence[torch.Tensor]) -> list[int]:
        """Of each."""
        return [x._version for x in xs]

    def counts_writes(self, x: torch.Tensor) -> bool:
        """Whether it has a version counter."""
        return not x.is_inference()

    def uncounted(self, x: torch.Tensor) -> torch.Tensor:
        """``x.data`` has a version counter of its own."""
        return x.data

    def preserve_version(self, xs: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Writes inside do not count."""
        return torch.autograd._unsafe_preserve_version_counter(tuple(xs))


class _Watch(TorchDispatchMode):
    """Hands every operation to a function."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


@contextmanager
def _casting(states: Sequence[tuple[str, torch.dtype, bool]], caches: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype, is_enabled in states:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=caches))
        yield


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _node(x: torch.Tensor) -> Any:
    if x.grad_fn is None:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} that no recorded operation made has no turn in backward: give the result of one"
        )
    return x.grad_fn


def _check_scalars(tensors: Sequence[torch.Tensor], function: str, argument: str) -> None:
    shapes = [tuple(x.shape) for x in tensors if x.dim() != 0]
    if shapes:
        raise ValueError(
            f"{function} without {argument} starts from ones, for 0-d tensors only; got shapes {shapes}: "
            f"reduce them to a scalar, or pass {argument} of the same shapes"
        )
