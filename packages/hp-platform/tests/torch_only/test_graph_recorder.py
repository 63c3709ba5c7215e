"""How work is recorded in graphs, by a stand-in for torch's module of functions that keeps its rules; the real one: conformance."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hp_platform.torch.device._cuda_graphs import GraphRecorder, HeldGraphs


class Stream:
    device_index, device = 0, "cuda:0"

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.waited_for: int | None = None

    def wait_stream(self, other: Stream) -> None:
        self.waited_for = other.stream_id

    def record_event(self) -> str:
        return f"event of {self.stream_id}"


class Api:
    """Functions, and the device whose they are."""

    def __init__(self) -> None:
        self.streams = [Stream(0), Stream(1)]
        self.current = self.streams[0]
        self.log: list[str] = []
        self.recording: Stream | None = None
        self.is_broken = False
        self.has_no_memory = False
        """For the generator's numbers, which the first graph takes."""
        self.num_allocations = 0
        self.pools: list[tuple[int, int]] = [(0, 0), (0, 3)]
        """That have memory."""
        self.num_graphs_ended = self.num_graphs_gone = 0
        """Those that torch frees workspaces with."""

    # --- of the device
    def current_stream(self) -> Stream:
        return self.current

    def new_stream(self) -> Stream:
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def use_stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # --- of torch
    def default_stream(self, device: Any) -> Stream:
        return self.streams[0]

    def is_current_stream_capturing(self) -> bool:
        return self.recording is self.current

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert device == 0
        return {"allocation": {"all": {"allocated": self.num_allocations}}}

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.log.append("snapshot")
        return [{"segment_pool_id": pool, "blocks": []} for pool in self.pools]

    def CUDAGraph(self) -> Any:  # noqa: N802
        api = self

        class Graph:
            is_ended = False

            def __del__(self) -> None:
                api.num_graphs_gone += self.is_ended

            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                assert capture_error_mode == "thread_local"
                assert api.current is not api.streams[0], "the default stream records nothing"
                assert api.recording is None
                if api.has_no_memory:
                    raise RuntimeError("out of memory")
                assert not gc.isenabled() or pool is None
                api.recording = api.current
                api.log.append(f"begin on {api.current.stream_id}")

            def capture_end(self) -> None:
                assert api.recording is api.current
                api.recording = None
                if api.is_broken:
                    api.is_broken = False
                    raise RuntimeError("invalidated")
                self.is_ended = True
                api.num_graphs_ended += 1
                api.log.append("end")

            def replay(self) -> None:
                api.log.append("replay")

        return Graph()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    found = Api()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: found.log.append(name))
    return found


def test_a_stream_records_itself_and_the_default_stream_has_another_one_do_it(api: Api) -> None:
    recorder = GraphRecorder(api, api)
    for stream, on in ((api.streams[0], 2), (api.streams[1], 1), (api.streams[0], 2)):
        api.current = stream
        api.log.clear()
        seen = []
        record = recorder.record(lambda seen=seen: seen.append(recorder.place([])))
        assert api.log == [f"begin on {on}", "end"]
        assert seen == [None]
        assert recorder.place([])[:2] == (0, stream.stream_id)
        record.launch()
        assert api.log[-1] == "replay"
        assert record.mark() == f"event of {stream.stream_id}"
    assert len(api.streams) == 3
    assert gc.isenabled()


def test_the_first_time_work_is_done_on_the_stream_that_will_record_it(api: Api) -> None:
    recorder, on = GraphRecorder(api, api), []
    default, side = api.streams
    recorder.first(lambda: on.append(api.current.stream_id))
    assert on == [2]
    # It has waited for what was before, and what comes next waits for it.
    assert api.streams[2].waited_for == 0 and default.waited_for == 2
    default.waited_for = None

    def wrong() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        recorder.first(wrong)
    assert default.waited_for == 2 and api.current is default
    api.current = side
    recorder.first(lambda: on.append(api.current.stream_id))
    assert on == [2, 1] and side.waited_for is None


def test_what_allocates_is_refused(api: Api) -> None:
    def allocates() -> None:
        api.num_allocations += 1
        api.pools.append((0, 7))

    with pytest.raises(RuntimeError, match="it allocates memory on the device"):
        GraphRecorder(api, api).record(allocates)
    assert api.log == ["begin on 2", "end", "snapshot"]


def test_what_another_thread_allocates_meanwhile_is_not_taken_for_the_works(api: Api) -> None:
    def meanwhile() -> None:
        api.num_allocations += 1

    GraphRecorder(api, api).record(meanwhile)
    assert api.log == ["begin on 2", "end", "snapshot"]


def test_what_raises_ends_its_recording(api: Api) -> None:
    def wrong() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        GraphRecorder(api, api).record(wrong)
    assert api.log == ["begin on 2", "end"]
    assert api.recording is None and gc.isenabled() and api.current is api.streams[0]


@pytest.mark.parametrize("raises", [False, True])
def test_after_a_recording_that_broke_allocator_and_generator_are_set_right(api: Api, raises: bool) -> None:
    def breaks() -> None:
        api.is_broken = True
        if raises:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted" if raises else "invalidated"):
        GraphRecorder(api, api).record(breaks)
    healed = ["_cuda_endAllocateToPool", "_cuda_releasePool", "begin on 2", "end"]
    assert api.log == ["begin on 2", *healed]
    assert api.recording is None and gc.isenabled()


@pytest.mark.parametrize("kind", ["allocates", "breaks"])
def test_a_graph_that_is_not_launched_lives_as_long_as_those_that_are(api: Api, kind: str) -> None:
    def wrong() -> None:
        if kind == "breaks":
            api.is_broken = True
        api.num_allocations += 1
        api.pools.append((0, 7))

    recorder = GraphRecorder(api, api)
    record = recorder.record(lambda: None)
    with pytest.raises(RuntimeError):
        recorder.record(wrong)
    gc.collect()
    # torch would free the workspaces of the stream, which the record writes into.
    assert api.num_graphs_ended == 2 and api.num_graphs_gone == 0
    del record, recorder
    gc.collect()
    assert api.num_graphs_gone == 2


@pytest.mark.parametrize("makes_products", [False, True])
def test_no_graph_of_a_stream_goes_while_records_of_products_on_it_live(
    api: Api, makes_products: bool
) -> None:
    """Whoever they were recorded for: torch has few streams to give, and frees the workspaces of one with any graph of it."""
    held = HeldGraphs()
    products = GraphRecorder(api, api, held)
    others = GraphRecorder(api, api, held, makes_products=makes_products)
    api.current = api.streams[1]
    of_an_optimizer, of_a_model = products.record(lambda: None), others.record(lambda: None)
    api.current = api.streams[0]
    elsewhere = others.record(lambda: None)
    del elsewhere
    gc.collect()
    assert api.num_graphs_gone == 1
    del of_a_model
    gc.collect()
    assert api.num_graphs_gone == 1
    of_an_optimizer.launch()
    del of_an_optimizer
    gc.collect()
    assert api.num_graphs_gone == 3 and not held


def test_graphs_without_products_go_one_by_one(api: Api) -> None:
    """They may be many, and memory that they do not need goes with them."""
    recorder = GraphRecorder(api, api, makes_products=False)
    records = [recorder.record(lambda: None) for _ in range(3)]
    for number in (1, 2, 3):
        records.pop().launch()
        gc.collect()
        assert api.num_graphs_gone == number


def test_memory_of_another_device_than_the_current_one_is_not_recorded(api: Api) -> None:
    recorder = GraphRecorder(api, api)
    here, there = (type("Tensor", (), {"device": torch.device("cuda", index)}) for index in range(2))
    assert recorder.place([here, here]) is not None
    assert recorder.place([there, there]) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fp32_precision", ("ieee", "tf32")),
        ("allow_bf16_reduced_precision_reduction", (True, False)),
        ("allow_fp16_reduced_precision_reduction", (True, False)),
        ("allow_fp16_accumulation", (True, False)),
    ],
)
def test_products_of_another_precision_are_other_work(api: Api, name: str, values: Any) -> None:
    recorder, settings = GraphRecorder(api, api), torch.backends.cuda.matmul
    before, found = getattr(settings, name), []
    try:
        for value in values:
            setattr(settings, name, value)
            found.append(recorder.place([]))
    finally:
        setattr(settings, name, before)
    assert found[0] != found[1]


def test_nothing_is_recorded_or_launched_beside_graphs_of_torchs_compiler(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = GraphRecorder(api, api)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert recorder.place([]) is not None
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", api)
    assert recorder.place([]) is None


def test_layouts_tell_apart_whatever_kernels_depend_on(api: Api) -> None:
    recorder = GraphRecorder(api, api)
    x = torch.zeros(4, 6)
    others = [x[1:], x.mT, x.view(torch.int32), x.view(6, 4), x[:, :3], torch.zeros(4, 6)]
    layouts = [recorder.layout(each) for each in (x, *others)]
    assert len(set(layouts)) == len(layouts)
    assert recorder.layout(x.detach()) == layouts[0]


def test_writes_are_counted_but_those_to_tensors_that_count_none(api: Api) -> None:
    recorder = GraphRecorder(api, api)
    x = torch.zeros(3)
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    recorder.count_writes([x, uncounted])
    recorder.count_writes([uncounted])
    assert x._version == 1


def test_a_device_without_memory_for_its_first_graph_does_the_work_and_tries_again(api: Api) -> None:
    recorder = GraphRecorder(api, api)
    api.has_no_memory = True
    recorder.first(lambda: api.log.append("work"))
    assert api.log == ["work"]
    api.has_no_memory = False
    recorder.first(lambda: api.log.append("work"))
    assert api.log == ["work", "begin on 2", "end", "work"]
    recorder.first(lambda: api.log.append("work"))
    assert api.log[-2:] == ["work", "work"]
