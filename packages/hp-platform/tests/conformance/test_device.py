"""DeviceHandle, streams and events, and what the platform says of its devices."""

from __future__ import annotations

import numpy as np
import pytest

from hp_platform.capabilities import CAPABILITIES
from hp_platform.protocols import DeviceHandle

MIB = 1 << 20


@pytest.fixture
def handle(platform, device) -> DeviceHandle:
    return platform.device(device)


def test_a_handle_says_what_it_is(platform, device, handle):
    assert isinstance(handle, DeviceHandle)
    assert handle.name == device
    assert handle.comm_backend in ("gloo", "nccl", "hccl", "mccl")
    assert handle.is_available()
    assert handle.count() >= 1
    assert handle.current().partition(":")[0] == device
    assert platform.device(handle.current()) is handle


def test_the_current_device_is_chosen_by_index(handle):
    handle.set_current(0)
    assert handle.current() in (handle.name, f"{handle.name}:0")
    with pytest.raises(ValueError, match="99"):
        handle.set_current(99)


def test_cpu_is_always_a_device_and_the_best_one_is_the_default(platform):
    kinds = platform.device_types()
    assert "cpu" in kinds
    assert platform.device().name == kinds[0]
    assert platform.device("cpu").is_available()


def test_an_unknown_device_is_refused(platform):
    with pytest.raises(ValueError, match="'quantum'"):
        platform.device("quantum")


def test_a_device_that_this_machine_lacks_is_refused(platform):
    absent = [kind for kind in ("cuda", "npu") if kind not in platform.device_types()]
    assert absent, "no machine has both"
    for kind in absent:
        with pytest.raises((RuntimeError, ValueError), match=kind):
            platform.device(kind)


def test_every_capability_has_an_answer_and_a_misspelt_one_is_refused(platform, device, lacks):
    for name, meaning in CAPABILITIES.items():
        assert "; without it " in meaning, f"{name} does not say the way out"
        assert lacks(name) is not platform.supports(name, device)
        assert isinstance(platform.supports(name), bool)
    with pytest.raises(ValueError, match="unknown capability 'steams'"):
        platform.supports("steams", device)


def test_work_on_a_side_stream_is_ordered_by_waiting(platform, device, handle, make, equal):
    x = make([1.0, 2.0])
    side, main = handle.new_stream(high_priority=True), handle.current_stream()
    side.wait_stream(main)
    with handle.use_stream(side):
        y = x * 2
        handle.record_stream(x, side)
        done = side.record_event()
    main.wait_event(done)
    handle.record_stream(y, main)
    equal(y + 1, [3.0, 5.0])
    side.synchronize()
    assert done.query()


def test_events_order_streams_and_the_host(handle, make, equal):
    event, side = handle.new_event(), handle.new_stream()
    x = make([1.0]) + 1
    event.record()
    event.wait(side)
    with handle.use_stream(side):
        y = x + 1
    handle.current_stream().wait_stream(side)
    again = handle.current_stream().record_event(event)
    assert again is event
    event.synchronize()
    assert event.query()
    event.wait()
    equal(y, [3.0])


def test_events_measure_time_in_milliseconds(handle, make):
    import time

    start, end = handle.new_event(timing=True), handle.new_event(timing=True)
    start.record(handle.current_stream())
    handle.synchronize()
    time.sleep(0.02)
    make([1.0])
    end.record()
    handle.synchronize()
    # Between the records lie at least the 20 ms of sleep; the upper limit is only there to catch another unit.
    assert 15 < start.elapsed_ms(end) < 15_000


def test_memory_is_counted_where_the_allocator_counts(platform, device, handle, lacks):
    handle.reset_peak_memory()
    before = handle.memory_allocated()
    x = platform.zeros((8 * MIB,), "uint8", device)
    handle.synchronize()
    during = handle.memory_allocated()
    if lacks("memory_stats"):
        assert during > 8 * MIB  # resident memory of a process that has loaded a framework
        assert dict(handle.memory_stats()) == {}
        assert handle.max_memory_allocated() >= during
        return
    assert during - before >= 8 * MIB
    del x
    assert handle.memory_allocated() <= during - 8 * MIB
    assert handle.max_memory_allocated() >= during
    handle.empty_cache()
    handle.reset_peak_memory()
    assert handle.max_memory_allocated() < during
    assert len(handle.memory_stats()) > 0


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_host_memory_is_copied_from_and_to_without_waiting(platform, device, handle, make, equal, name):
    sent, received = handle.empty_pinned((2, 3), name), handle.empty_pinned((2, 3), platform.dtype(name))
    for x in (sent, received):
        assert platform.device_of(x) == "cpu"
        assert (tuple(x.shape), platform.dtype_name(x.dtype)) == ((2, 3), name)
        assert handle.is_pinned(x)
    numbers = np.arange(6).reshape(2, 3)
    platform.copy_(sent, platform.tensor(numbers, name, "cpu"))
    there, also = make(np.zeros((2, 3)), name), make(np.zeros((2, 3)), name)
    if platform.supports("streams", device):
        assert not handle.is_pinned(there)
        assert not handle.is_pinned(platform.zeros((2, 3), name, "cpu"))
    assert platform.copy_(there, sent, non_blocking=True) is there
    platform.foreach_copy_([also], [there + there], non_blocking=True)
    platform.foreach_copy_([received], [also], non_blocking=True)
    done = handle.new_event()
    done.record()
    done.synchronize()
    equal(received, 2 * numbers)
    assert tuple(handle.empty_pinned((0, 2), name).shape) == (0, 2)


def test_free_memory_is_a_part_of_all_memory(handle):
    free, total = handle.memory_info()
    assert 0 < free <= total
    handle.empty_cache()


def test_a_profiler_range_surrounds_work(handle, make, equal):
    with handle.profiler_range("conformance"):
        x = make([1.0]) * 2
    equal(x, [2.0])
