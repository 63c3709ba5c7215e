"""Graphs of launches on the host: what a work calls is kept by the addresses of its tensors, and called again on whatever lies there.

As on a device nothing is done while it is recorded, and a recording of what allocates or waits is refused.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


class Place:
    """Where a tensor lay."""

    def __init__(self, x: torch.Tensor) -> None:
        self.address, self.dtype, self.shape, self.stride = x.data_ptr(), x.dtype, x.shape, x.stride()

    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        num_bytes = (last + 1) * self.dtype.itemsize
        memory = (ctypes.c_byte * num_bytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.stride)


class Recording(TorchDispatchMode):
    """Keeps calls and does none, but those that make views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returns = func._schema.returns
        is_view = not func._schema.is_mutable and any(each.alias_info is not None for each in returns)
        if is_view:
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            raise RuntimeError(f"{func} allocates or waits")
        places = tree_map(lambda x: Place(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        self.calls.append((func, *places))
        return kwargs.get("out", args[0] if returns else None)


class Graph:
    """A record."""

    def __init__(self, calls: list[tuple[Any, Any, Any]]) -> None:
        self._calls = calls

    def launch(self) -> None:
        """Call all again."""
        for func, args, kwargs in self._calls:
            func(*_there(args), **_there(kwargs))

    def mark(self) -> Any:
        """It has ended."""
        return torch.Event("cpu")


def _there(places: Any) -> Any:
    return tree_map(lambda x: x.tensor() if isinstance(x, Place) else x, places)


class Memory:
    """Gives out memory as the allocator of a device does: what is free is taken again, in the same order."""

    def __init__(self) -> None:
        self._storages: dict[int, list[torch.UntypedStorage]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, whose memory is free again when it and its views are gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        storages = self._storages.setdefault(num_bytes, [])
        found = next((each for each in storages if _is_free(each)), None)
        if found is None:
            found = torch.UntypedStorage(num_bytes)
            storages.append(found)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return torch.empty(0, dtype=dtype).set_(found, 0, tuple(shape), strides)


def _is_free(storage: torch.UntypedStorage) -> bool:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count == 1


class HostRecorder:
    """Implements :class:`hp_platform.repeated.Recorder`."""

    is_recorded = False
    """By the caller."""

    def place(self, tensors: Sequence[torch.Tensor]) -> Hashable | None:
        """There is one stream."""
        return None if self.is_recorded else "host"

    def layout(self, x: torch.Tensor) -> Hashable:
        """Address, dtype, shape and strides."""
        return x.data_ptr(), x.dtype, x.shape, x.stride()

    def first(self, work: Callable[[], None]) -> None:
        """Do it."""
        work()

    def record(self, work: Callable[[], None]) -> Graph:
        """Keep the calls of ``work``."""
        with Recording() as recording:
            work()
        assert recording.calls, "an empty record"
        return Graph(recording.calls)

    def count_writes(self, xs: Sequence[torch.Tensor]) -> None:
        """Count."""
        torch.autograd.graph.increment_version(xs)


def touched(graph: Graph) -> list[Place]:
    """Everything that its calls read and write."""
    leaves, _ = tree_flatten([(args, kwargs) for _, args, kwargs in graph._calls])
    return [leaf for leaf in leaves if isinstance(leaf, Place) and 0 not in leaf.shape]
