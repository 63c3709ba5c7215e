"""The device functions of torch.npu, run by torch_npu's own allocator, streams, events and generators."""

import os
import subprocess
import sys

import pytest
import torch
import torch_npu  # noqa: F401

MIB = 1 << 20


def test_environment_says_how_many_devices_there_are() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == int(os.environ.get("NPU_EMULATOR_DEVICES", "8"))
    assert torch.npu.get_device_name() == "Ascend910B1"
    with pytest.raises(RuntimeError):
        torch.npu.set_device(64)


def test_devices_keep_separate_accounts() -> None:
    before = torch.npu.memory_allocated(1)
    x = torch.ones(MIB, device="npu:1")
    assert x.device.index == 1
    assert torch.npu.memory_allocated(1) - before == pytest.approx(4 * MIB, abs=1024)
    assert torch.equal(x.to("npu:0").cpu(), torch.ones(MIB))


def test_memory_is_accounted(npu: torch.device) -> None:
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    free_before, total = torch.npu.mem_get_info()
    x = torch.empty(8 * MIB, dtype=torch.float32, device=npu)
    assert torch.npu.memory_allocated() - before == pytest.approx(32 * MIB, abs=1024)
    assert torch.npu.memory_stats()["allocated_bytes.all.current"] == torch.npu.memory_allocated()
    assert free_before - torch.npu.mem_get_info()[0] >= 32 * MIB
    assert total == int(os.environ.get("NPU_EMULATOR_MEMORY_MB", "65536")) * MIB
    del x
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before == pytest.approx(32 * MIB, abs=1024)
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == pytest.approx(free_before, abs=4 * MIB)


def test_too_large_an_allocation_is_out_of_memory(npu: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device=npu)


def test_environment_limits_the_memory() -> None:
    program = (
        "import torch, torch_npu\n"
        "kept = torch.empty(40 << 20, dtype=torch.uint8, device='npu')\n"
        "try:\n    torch.empty(40 << 20, dtype=torch.uint8, device='npu')\n"
        "except torch.OutOfMemoryError:\n    print('out of memory')\n"
    )
    env = os.environ | {"NPU_EMULATOR_MEMORY_MB": "64"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=180
    )
    assert "out of memory" in result.stdout, result.stderr


def test_fresh_memory_is_not_zero(npu: torch.device) -> None:
    torch.npu.empty_cache()
    assert torch.empty(16 * MIB, dtype=torch.uint8, device=npu)[:4].tolist() == [0xCB] * 4


def test_streams_order_work_through_events(npu: torch.device) -> None:
    side = torch.npu.Stream()
    assert side != torch.npu.current_stream()
    x = torch.ones(4, device=npu)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
        y = x * 2
        event = torch.npu.Event()
        event.record()
    torch.npu.current_stream().wait_event(event)
    assert (y + x).tolist() == [3.0] * 4
    side.synchronize()
    assert event.query()
    assert side.query()


def test_events_measure_time(npu: torch.device) -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        torch.ones(4, device=npu).add_(1)
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 10_000


def test_memory_of_a_stream_is_kept_by_record_stream(npu: torch.device) -> None:
    side = torch.npu.Stream()
    x = torch.ones(MIB, device=npu)
    x.record_stream(side)
    del x
    torch.npu.synchronize()
    assert torch.ones(MIB, device=npu).sum().item() == MIB


def test_random_state_is_restored(npu: torch.device) -> None:
    torch.npu.manual_seed(7)
    first = torch.randn(64, device=npu)
    state = torch.npu.get_rng_state()
    second = torch.randn(64, device=npu)
    assert not torch.equal(first, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(64, device=npu), second)
    torch.npu.manual_seed(7)
    assert torch.equal(torch.randn(64, device=npu), first)


def test_torch_seed_covers_the_device(npu: torch.device) -> None:
    torch.manual_seed(3)
    first = torch.rand(8, device=npu)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(8, device=npu), first)


def test_a_generator_has_a_state_of_its_own(npu: torch.device) -> None:
    generator = torch.Generator(device=npu).manual_seed(5)
    state = torch.npu.get_rng_state()
    first = torch.rand(8, device=npu, generator=generator)
    assert torch.equal(torch.npu.get_rng_state(), state)
    generator.manual_seed(5)
    assert torch.equal(torch.rand(8, device=npu, generator=generator), first)


def test_dropout_keeps_its_share(npu: torch.device) -> None:
    kept = torch.nn.functional.dropout(torch.ones(10_000, device=npu), 0.25)
    assert (kept != 0).float().mean().item() == pytest.approx(0.75, abs=0.03)


def test_checkpointed_dropout_repeats_its_mask(npu: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(256, device=npu, requires_grad=True)
    out = checkpoint(lambda t: torch.nn.functional.dropout(t * 1.0, 0.5), x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_autocast_computes_in_bfloat16(npu: torch.device) -> None:
    assert torch.npu.is_bf16_supported()
    x, weight = torch.randn(2, 3, device=npu), torch.randn(4, 3, device=npu)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert torch.nn.functional.softmax(x, -1).dtype == torch.float32
    assert torch.nn.functional.linear(x, weight).dtype == torch.float32


def test_pinned_memory_is_copied_without_blocking(npu: torch.device) -> None:
    pinned = torch.arange(8.0).pin_memory()
    assert pinned.is_pinned()
    x = pinned.to(npu, non_blocking=True)
    back = torch.empty(8).pin_memory()
    back.copy_(x, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, pinned)


def test_tensors_survive_save_and_load(npu: torch.device, tmp_path) -> None:
    x = torch.arange(6.0, device=npu).reshape(2, 3).t()
    torch.save({"x": x}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)["x"]
    assert loaded.device == x.device
    assert torch.equal(loaded.cpu(), x.cpu())
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=True)["x"], x.cpu())
