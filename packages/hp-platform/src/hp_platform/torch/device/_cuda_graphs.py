"""Records of work on cuda: graphs of launches that the driver keeps.

[Note: graphs without memory] torch's own way to record gives every graph a pool of memory, collects garbage and empties the caches
before. Here all memory is the caller's, so nothing of that is wanted, and a record in which something was allocated all the same is
refused, once for every name: it holds that memory for as long as it lives. What libraries take once per stream, as workspaces of
products, they have taken when the work was done the first time, on the stream that records it.

[Note: a failed record] Whatever in a work waits for the device ends its recording in an error. torch then leaves its allocator in
the belief that the recording goes on, and in some versions its generator of random numbers, too. So the allocator is told, and a
recording of next to nothing, which succeeds, sets the generator right.

[Note: workspaces that go] A record of products has the addresses of their workspaces. torch keeps those for the life of the process, but
its compiler's own graphs (``torch.compile(mode="reduce-overhead")``) free them, and the next record would write into memory that
somebody else has got. So from the moment that these are loaded nothing is recorded, and no record is launched. Since 2.12 torch frees those
of a stream with every graph of it (pytorch/pytorch#193402), and gives the same few streams to everybody who asks for one: records of a
runtime that has gone may be of the stream on which an optimizer has its products. So while records with products live, all graphs of
their stream do, whosever they were (:class:`_Held`); and a recorder lets go of none that it has refused.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from hp_platform.protocols.device import Event

_COMPILED_GRAPHS = "torch._inductor.cudagraph_trees"
"""See [Note: workspaces that go]."""


class _Device(Protocol):
    def current_stream(self) -> Any: ...
    def new_stream(self) -> Any: ...
    def use_stream(self, stream: Any) -> AbstractContextManager[None]: ...


class _Held:
    """Graphs of one stream that nobody launches any more. It lives while records with products of that stream do."""

    __slots__ = ("__weakref__", "graphs")

    def __init__(self) -> None:
        self.graphs: list[Any] = []


HeldGraphs = WeakValueDictionary[Hashable, _Held]
"""By stream that has recorded; of a device's handle. See [Note: workspaces that go]."""


class _Graph:
    """A record of one stream."""

    __slots__ = ("_graph", "_held_by_stream", "_holds", "_recording", "_stream", "launch")

    def __init__(
        self, graph: Any, stream: Any, held: HeldGraphs, recording: Hashable, holds: _Held | None
    ) -> None:
        """``recording``: the stream that has recorded; ``holds``: of records with products."""
        self._graph, self._stream = graph, stream
        self._held_by_stream, self._recording, self._holds = held, recording, holds
        self.launch: Callable[[], None] = graph.replay

    def __del__(self) -> None:
        """In any thread. The last record with products lets go of all."""
        held = self._held_by_stream.get(self._recording)
        if held is not None:
            held.graphs.append(self._graph)

    def mark(self) -> Event:
        """Behind all that the stream has."""
        event: Event = self._stream.record_event()
        return event


class GraphRecorder:
    """Implements :class:`hp_platform.repeated.Recorder`. ``api``: torch's module of functions for the device; ``held``: one for all
    recorders of the device; ``makes_products`` False: nothing that is recorded has workspaces.
    """

    def __init__(
        self, device: _Device, api: Any, held: HeldGraphs | None = None, *, makes_products: bool = True
    ) -> None:
        self._device, self._api = device, api
        self._held: HeldGraphs = WeakValueDictionary() if held is None else held
        self._makes_products = makes_products
        self._side: dict[int, Any] = {}
        """By index of a device the stream on which what runs on its default stream is recorded: that one records nothing."""
        self._refused: list[Any] = []
        """Graphs that are launched never. See [Note: workspaces that go]."""
        self._prepared: set[int] = set()
        """Indices of devices that have one of these. See :meth:`_prepare`."""

    def place(self, tensors: Sequence[torch.Tensor]) -> Hashable | None:
        """The current stream, and how products are made now. None while it records, for tensors of another device, whose work no stream
        of this one gets, and where workspaces may go.
        """
        if self._api.is_current_stream_capturing() or _COMPILED_GRAPHS in sys.modules:
            return None
        stream = self._device.current_stream()
        if any(x.device.index != stream.device_index for x in tensors[:1]):
            return None
        return stream.device_index, stream.stream_id, *_ways_of_products()

    def layout(self, x: torch.Tensor) -> Hashable:
        """Address, dtype, shape and strides."""
        return x.data_ptr(), x.dtype, x.shape, x.stride()

    def first(self, work: Callable[[], None]) -> None:
        """What the default stream has goes to the stream that records for it, and comes back to it."""
        stream = self._device.current_stream()
        recording = self._recording(stream)
        if stream.device_index not in self._prepared:
            self._prepare(recording)
        if recording is stream:
            work()
            return
        recording.wait_stream(stream)
        try:
            with self._device.use_stream(recording):
                work()
        finally:
            stream.wait_stream(recording)

    def record(self, work: Callable[[], None]) -> _Graph:
        """A graph of what ``work`` launches. RuntimeError for what waits or allocates."""
        api, stream = self._api, self._device.current_stream()
        pool = api.graph_pool_handle()
        before = self._num_allocations(stream.device_index)
        recording = self._recording(stream)
        with self._device.use_stream(recording), _garbage_waits():
            graph = self._captured(work, pool, stream.device_index)
        # Another thread may have allocated something, too.
        if self._num_allocations(stream.device_index) != before and self._has_memory(pool):
            self._refused.append(graph)
            raise RuntimeError("it allocates memory on the device; give it all that it needs")
        key = (recording.device_index, recording.stream_id)
        holds = self._held.setdefault(key, _Held()) if self._makes_products else None
        return _Graph(graph, stream, self._held, key, holds)

    def _num_allocations(self, device: int) -> int | None:
        """So far; None from allocators that do not count them."""
        figures = self._api.memory_stats_as_nested_dict(device)
        counted: int | None = figures.get("allocation", {}).get("all", {}).get("allocated")
        return counted

    def _has_memory(self, pool: Any) -> bool:
        # Of all pools: to ask for those of one, as `memory_snapshot(pool)`, gives references to its numbers back that torch 2.11 has
        # not taken, and after some hundred calls the interpreter lets go of numbers that are in use.
        return any(
            tuple(segment["segment_pool_id"]) == tuple(pool) for segment in self._api.memory_snapshot()
        )

    def count_writes(self, xs: Sequence[torch.Tensor]) -> None:
        """Where versions are counted."""
        counted = [x for x in xs if not x.is_inference()]
        if counted:
            torch.autograd.graph.increment_version(counted)

    def _captured(self, work: Callable[[], None], pool: Any, device: int) -> Any:
        graph = self._api.CUDAGraph()
        # Other threads may go on allocating, and asking whether collectives have ended.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            self._end(graph, pool, device, is_failure=True)
            raise
        self._end(graph, pool, device)
        return graph

    def _end(self, graph: Any, pool: Any, device: int, *, is_failure: bool = False) -> None:
        try:
            with warnings.catch_warnings():
                if is_failure:  # what comes before an error may be nothing
                    warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
                graph.capture_end()
        except RuntimeError:
            self._heal(pool, device)
            if not is_failure:
                raise

    def _heal(self, pool: Any, device: int) -> None:
        """See [Note: a failed record]."""
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        self._record_nothing()

    def _prepare(self, stream: Any) -> None:
        """With its first graph a device's generator of random numbers takes two numbers, and keeps them while there is one: now, so that
        a later step takes no memory that the first ones have not taken.
        """
        try:
            with self._device.use_stream(stream):
                self._record_nothing()
        except RuntimeError:
            return  # no memory for them: the work goes on, and what is wrong is said where a record fails
        self._prepared.add(stream.device_index)

    def _record_nothing(self) -> None:
        graph = self._api.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
            graph.capture_begin(capture_error_mode="thread_local")
            graph.capture_end()
        self._refused.append(graph)

    def _recording(self, stream: Any) -> Any:
        """Which stream records for one: itself where it can, so that launches keep its priority, and libraries the workspaces of it."""
        if stream != self._api.default_stream(stream.device):
            return stream
        found = self._side.get(stream.device_index)
        if found is None:
            found = self._side[stream.device_index] = self._device.new_stream()
        return found


def _ways_of_products() -> tuple[Hashable, ...]:
    """What users set for the process, and kernels are chosen by: in which precision products add up."""
    found = torch._C
    return (
        found._get_fp32_precision_getter("cuda", "matmul"),
        found._get_cublas_allow_bf16_reduced_precision_reduction(),
        found._get_cublas_allow_fp16_reduced_precision_reduction(),
        found._get_cublas_allow_fp16_accumulation(),
    )


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """Nothing is collected: what frees or destroys something of the device ends a recording."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
