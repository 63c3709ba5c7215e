"""Autograd with torch's meaning: leaves gather ``.grad``, hooks fire during backward, Functions have forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_platform.protocols.nn import HookHandle, Parameter
from hp_platform.protocols.tensor import Tensor


class AutogradOps(Protocol):
    """Primitives of differentiation."""

    Function: type
    """Base class: static ``forward(ctx, *args)`` and ``backward(ctx, *grads)``; ``apply``; ``ctx.save_for_backward``, ``ctx.saved_tensors``,
    ``ctx.needs_input_grad``, ``ctx.mark_non_differentiable``. Backward may itself call differentiable functions (double backward)."""

    TraceableFunction: type
    """:attr:`Function` for code that a compiler records, where ``supports("traced_collectives")``: what others have put in the place of
    ``Function.apply`` does not count for it."""

    def no_grad(self) -> AbstractContextManager[None]:
        """Nothing inside is recorded."""
        ...

    def enable_grad(self) -> AbstractContextManager[None]:
        """Recording on again, inside of ``no_grad``."""
        ...

    def recordable(self) -> AbstractContextManager[None]:
        """:meth:`no_grad`, whose new tensors may be used later where something is recorded, also if the caller is in a mode in
        which such tensors are not made (``torch.inference_mode``). For what is made once and kept.
        """
        ...

    def is_grad_enabled(self) -> bool:
        """Whether operations are being recorded now."""
        ...

    def requires_grad(self, x: Tensor) -> bool:
        """Whether a gradient flows to ``x``."""
        ...

    def requires_grads(self, xs: Sequence[Tensor]) -> list[bool]:
        """:meth:`requires_grad` of each: for runtimes that ask at every step."""
        ...

    def set_requires_grad_(self, x: Tensor, flag: bool) -> Tensor:
        """Ask for the gradient of a leaf, or stop asking."""
        ...

    def is_leaf(self, x: Tensor) -> bool:
        """Whether ``x`` was not made by a recorded operation."""
        ...

    def detach(self, x: Tensor) -> Tensor:
        """The same memory outside of the graph."""
        ...

    def backward(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor] | None = None, *, retain_graph: bool = False
    ) -> None:
        """Add the gradients of all leaves to their ``grad``. ``grads`` None means ones, for 0-d tensors only (ValueError otherwise)."""
        ...

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        grad_outputs: Sequence[Tensor] | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        allow_unused: bool = False,
    ) -> list[Tensor | None]:
        """Gradients with respect to ``inputs`` as values; no ``grad`` attribute is touched. With ``create_graph`` they can be
        differentiated again: NotImplementedError where ``supports("double_backward")`` is not.
        """
        ...

    def get_grad(self, x: Tensor) -> Tensor | None:
        """The gradient gathered on a leaf so far. While it is the same and somebody holds it, it is the same object."""
        ...

    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        """Put a gradient (of the leaf's shape) in its place, or clear it."""
        ...

    def get_grads(self, xs: Sequence[Tensor]) -> list[Tensor | None]:
        """:meth:`get_grad` of each of some leaves."""
        ...

    def set_grads(self, xs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """:meth:`set_grad` of each of as many leaves. ValueError if there are not as many gradients."""
        ...

    def take_grads(self, xs: Sequence[Tensor]) -> list[Tensor | None]:
        """:meth:`get_grads`, outside of any graph; the leaves have none after that."""
        ...

    def register_tensor_hook(self, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> HookHandle:
        """``hook(grad)`` when the gradient of ``x`` is complete in a backward; may return another one."""
        ...

    def register_post_accumulate_grad_hook(
        self, x: Parameter, hook: Callable[[Parameter], None]
    ) -> HookHandle:
        """``hook(leaf)`` after a backward has added to the leaf's ``grad``, once per backward."""
        ...

    def queue_backward_callback(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when the backward that is running now has finished. RuntimeError outside of a backward."""
        ...

    def is_in_backward(self) -> bool:
        """Whether a graph is being walked now, by this thread: whether :meth:`queue_backward_callback` may be called."""
        ...

    def backward_operation(self) -> str | None:
        """The graph's node that runs now, in this thread, as the framework calls it (``"MulBackward0"``); None outside of a backward and
        where the framework does not say.
        """
        ...

    def backward_turn(self, x: Tensor) -> int:
        """When what made ``x`` has its turn in backward: of the nodes of a graph that are ready the one with the highest number runs
        first, and what is recorded later has a higher one. Needs ``supports("backward_turns")``.
        """
        ...

    def set_backward_turn(self, x: Tensor, turn: int) -> None:
        """Give what made ``x`` another turn. That changes when it runs, and nothing else: what it needs comes before it in any case."""
        ...

    def autocast_state(self) -> Callable[[], AbstractContextManager[None]]:
        """How the framework casts by itself now (``torch.autocast``): a function that makes contexts in which it casts likewise."""
        ...

    def watch_operations(self, run: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[None]:
        """Every operation below autograd is done by ``run(operation, args, kwargs)``, which calls ``operation(*args, **kwargs)`` or gives
        another result; ``str(operation)`` names it. Inside of ``run`` nothing is watched. Needs ``supports("operation_dispatch")``.
        """
        ...

    def detach_watched(self, x: Tensor) -> Tensor:
        """:meth:`detach` for use inside of ``run`` of :meth:`watch_operations`: writes to ``x`` count in the result's version, too."""
        ...

    def can_be_kept(
        self, operation: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the results of a watched operation, called with these arguments, can stand for doing it again: it writes to nothing that
        it is given, gives no views and no uninitialised memory, and draws no random numbers (later draws would be others). Attention
        draws some where it drops something.
        """
        ...

    def is_cast(self, operation: Any) -> bool:
        """Whether a watched operation only changes a dtype. Those that the framework does by itself (``torch.autocast``) it leaves out
        where it has done them before, so they are not the same every time.
        """
        ...

    def operations_of(self, function: Any) -> frozenset[Any]:
        """The watched operations that a function of the framework is made of (``torch.matmul``: products of all ranks), or the operation
        itself; empty for what is not known.
        """
        ...

    def saved_tensors_hooks(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[None]:
        """What operations inside keep for backward goes through ``pack``, and comes back through ``unpack``."""
        ...

    def version(self, x: Tensor) -> int:
        """How often ``x`` was written in place (0 where the framework does not count; see ``supports("version_counter")``)."""
        ...

    def versions(self, xs: Sequence[Tensor]) -> list[int]:
        """:meth:`version` of each."""
        ...

    def counts_writes(self, x: Tensor) -> bool:
        """Whether in-place writes to ``x`` show in its :meth:`version`: not for what was made in ``torch.inference_mode``, whose version
        must not be asked for.
        """
        ...

    def uncounted(self, x: Tensor) -> Tensor:
        """The same memory in the same storage, outside of any graph: writes to it do not count as writes to ``x``. What
        :meth:`preserve_version` does for a block, for as long as somebody writes there.
        """
        ...

    def preserve_version(self, xs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """In-place writes inside do not count, so that tensors saved for backward may be refilled with the same values."""
        ...
