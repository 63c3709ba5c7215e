"""How the arguments of a checkpointed call are kept until it runs again: as autograd keeps what it needs itself.

[Note: kept by autograd] Tensors among the arguments are saved by a node of the graph. So they are freed with the graph, a write to
one between the two runs is an error, and whoever handles saved tensors (a checkpoint around this one, a swap) handles these
too. Other arguments are kept as they are, and so are tensors that autograd does not save (made in inference mode).

[Note: wrapped tensors] A tensor that wraps a local one (a DTensor) is kept as that; see
:class:`hp_platform.protocols.local_wrapper.LocalWrapper`. The second run gets the same wrapper if it lives still and its local
tensor is the one that was kept, since operations may have put marks on it that they share; else one like it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hp_platform.containers import map_tensors
from hp_platform.on_platform import once
from hp_platform.platform import Platform
from hp_platform.protocols.local_wrapper import is_local_wrapper
from hp_platform.protocols.tensor import Tensor


class KeptInputs:
    """Of one call: :meth:`again` gives the arguments a second time, the same tensors in the same places."""

    def __init__(self, platform: Platform, tree: Any) -> None:
        """``tree``: the arguments, in nested lists, tuples, dicts and dataclasses."""
        self.platform = platform
        tensors: list[Tensor] = []
        self.devices: set[str] = set()
        """Where they lie."""

        def taken(x: Any) -> Any:
            is_wrapper = is_local_wrapper(x)
            local = x.__hp_local__() if is_wrapper else x
            device = platform.device_of(local)
            self.devices.add(device)
            if platform.supports("version_counter", device) and not platform.counts_writes(local):
                return x  # made in inference mode: autograd saves no such tensor
            index = len(tensors)
            tensors.append(local)
            return _Place(index, weakref.ref(x), x.__hp_rewrap__()) if is_wrapper else _Place(index)

        self._tree = map_tensors(lambda x: is_local_wrapper(x) or platform.is_tensor(x), taken, tree)
        self._kept = _keep()(tensors) if tensors else None

    def again(self) -> Any:
        """RuntimeError of the framework's own if one was written since, or if the graph was freed."""
        tensors = list(self._kept.saved_tensors) if self._kept is not None else []
        return map_tensors(lambda x: isinstance(x, _Place), lambda place: place.again(tensors), self._tree)


class _Place:
    """Of a tensor among those that were saved."""

    __slots__ = ("_index", "_rewrap", "_wrapper")

    def __init__(
        self,
        index: int,
        wrapper: Callable[[], Any] | None = None,
        rewrap: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._index, self._wrapper, self._rewrap = index, wrapper, rewrap

    def again(self, tensors: Sequence[Tensor]) -> Any:
        """What stood here."""
        local = tensors[self._index]
        if self._rewrap is None or self._wrapper is None:
            return local
        before = self._wrapper()
        return before if before is not None and before.__hp_local__() is local else self._rewrap(local)


@once
def _keep(platform: Platform) -> Callable[[Sequence[Tensor]], Any]:
    """A function that makes a node which has saved tensors; its ``saved_tensors`` gives them back."""

    class Keep(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, contexts: list[Any], start: Tensor, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            contexts.append(ctx)
            return platform.clone(start)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise AssertionError(
                "nothing depends on the node that keeps the arguments of a checkpointed call"
            )

    def keep(tensors: Sequence[Tensor]) -> Any:
        contexts: list[Any] = []
        # Recorded whatever the tensors require.
        start = platform.set_requires_grad_(platform.zeros((), platform.dtype("float32"), "cpu"), True)
        end = Keep.apply(contexts, start, *tensors)
        return _Kept(contexts[0], end)

    return keep


class _Kept:
    """A node's context, and its result, which keeps the node alive."""

    __slots__ = ("_context", "_end")

    def __init__(self, context: Any, end: Tensor) -> None:
        self._context, self._end = context, end

    @property
    def saved_tensors(self) -> Sequence[Tensor]:
        """Through the hooks that were in place when they were saved."""
        found: Sequence[Tensor] = self._context.saved_tensors
        return found
