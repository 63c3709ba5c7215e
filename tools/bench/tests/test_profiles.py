"""Where the time of a step goes: kinds by name, and interval arithmetic on a small trace."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.profiles import (
    COLUMNS,
    Activity,
    Kind,
    Profile,
    durations_of,
    kind_of,
    length,
    shortest_of,
    union,
    without_waiting,
)

# As kineto names them.
NAMES = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_NTT": Kind.MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": Kind.MATMUL,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": Kind.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>": Kind.MATMUL,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i_64x128x64": Kind.ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd>": Kind.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": Kind.ATTENTION,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>": Kind.ADAMW,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": Kind.GATHER,
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": Kind.GATHER,
    "Memcpy PtoP (Device -> Device)": Kind.GATHER,
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)": Kind.GATHER,
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": Kind.REDUCE,
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": Kind.REDUCE,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": Kind.REDUCE,
    "void (anonymous namespace)::oneRankReduce<(anonymous namespace)::FuncPreMulSum<float> >": Kind.REDUCE,
    "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>": Kind.COPIES,
    "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel": Kind.COPIES,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<2u>>": Kind.COPIES,
    "Memcpy DtoD (Device -> Device)": Kind.COPIES,
    "Memcpy HtoD (Pinned -> Device)": Kind.COPIES,
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}>>": Kind.COPIES,
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}>>": Kind.CASTS,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<float, c10::BFloat16, 2, 1, 1>": Kind.CASTS,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<float, float, 2, 1, 1>": Kind.COPIES,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda()#3}, at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1>>": Kind.CASTS,
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda(float)#1}, std::array<char*, 2ul> >": Kind.CASTS,
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda>": Kind.CASTS,
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel>": Kind.OTHER,
    "Memset (Device)": Kind.OTHER,
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_a_kernel_is_known_by_its_name(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


def test_a_union_joins_what_overlaps_or_touches() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 9), (7.5, 8)]) == [(0, 4), (5, 6), (7, 9)]
    assert length(union([(5, 6), (0, 2), (1, 3)])) == 4
    assert union([]) == []


def event(name: str, start: float, end: float, category: str = "kernel", stream: int = 7) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "args": {"stream": stream},
    }


# Two steps in microseconds; the second is the first one 10 ms later. In a step, from 1000 to 9000:
#   compute  matmul [1000, 3000], cast [3000, 3500] ... matmul [6000, 8000] beside another matmul [7000, 8500]
#   gather   [2000, 4500] on a stream of its own: alone from 3500 to 4500
#   nothing  from 4500 to 6000
#   reduce   [7000, 9000]: alone from 8500 to 9000
STEP = (
    event("nvjet_a", 1000, 3000),
    event("CopyFunctor<float, c10::BFloat16, 2", 3000, 3500),
    event("ncclDevKernel_AllGather", 2000, 4500, stream=20),
    event("nvjet_b", 6000, 8000),
    event("nvjet_b", 7000, 8500, stream=8),
    event("ncclDevKernel_ReduceScatter", 7000, 9000, stream=24),
)
OTHER_EVENTS = (
    event("aten::mm", 0, 30_000, category="cpu_op"),
    {"ph": "M", "name": "process_name", "args": {}},
    event("nvjet_a", 0, 30_000, category="gpu_user_annotation"),
)
TRACE = {
    "traceEvents": [
        *OTHER_EVENTS,
        *({**each, "ts": each["ts"] + shift} for shift in (0, 10_000) for each in STEP),
    ]
}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_becomes_milliseconds_of_a_step(tmp_path: Path, name: str) -> None:
    text, file = json.dumps(TRACE).encode(), tmp_path / name
    file.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found = Profile.read(file, num_steps=2)
    assert found.span == 9.0  # from 1000 to 19000
    assert found.busy[Kind.MATMUL] == 4.5  # [1000, 3000] and [6000, 8500]: the two side by side count once
    assert found.busy[Kind.CASTS] == 0.5
    assert found.busy[Kind.GATHER] == 2.5
    assert found.busy[Kind.REDUCE] == 2.0
    assert found.busy[Kind.ATTENTION] == found.busy[Kind.OTHER] == found.busy[Kind.ADAMW] == 0.0
    assert found.exposed == 1.5
    assert found.idle == (1.5 + 2.0 + 1.5) / 2  # the second 1.5: in the second step; 2.0: between the steps


def test_the_sums_close() -> None:
    found = Profile.of([Activity(e["name"], e["ts"], e["ts"] + e["dur"]) for e in STEP], 1)
    computing = 2.0 + 0.5 + 2.5
    assert found.span == pytest.approx(computing + found.exposed + found.idle)


def collective(start: float, end: float) -> Activity:
    return Activity("ncclDevKernel_AllGather", start, end)


def test_a_rank_that_waits_for_another_one_does_not_communicate() -> None:
    # The other rank comes to the first gather 3 ms later, and to the second one earlier.
    early = [collective(0, 4000), Activity("nvjet", 3500, 5000), collective(6000, 7000)]
    late = [collective(3000, 4000), Activity("nvjet", 4000, 5500), collective(5500, 7000)]
    shortest = shortest_of([durations_of(early), durations_of(late)])
    assert shortest == {"ncclDevKernel_AllGather": [1000, 1000]}
    assert without_waiting(early, shortest)[0] == collective(3000, 4000)
    found = Profile.of(early, 1, shortest)
    assert (found.exposed, found.waiting, found.busy[Kind.GATHER]) == (0.5 + 1.0, 3.0, 2.0)
    assert found.idle == 1.0
    found = Profile.of(late, 1, shortest)
    assert (found.exposed, found.waiting, found.idle) == (2.0, 0.5, 0.0)
    assert Profile.of(early, 1).exposed == 3.5 + 1.0


def test_copies_wait_for_nobody_and_collectives_that_do_not_match_count_whole() -> None:
    copies = [Activity("Memcpy PtoP (Device -> Device)", 0, 9)]
    assert durations_of(copies) == {}
    ranks = [durations_of([collective(0, 4)]), durations_of([collective(0, 1), collective(1, 2)])]
    assert shortest_of(ranks) == {}
    assert without_waiting([collective(0, 4)], {}) == [collective(0, 4)]


def test_the_heaviest_kernels_and_the_longest_gaps_are_named() -> None:
    found = Profile.of([Activity(e["name"], e["ts"], e["ts"] + e["dur"]) for e in STEP], 1)
    assert found.heaviest[0] == ("nvjet_b", "matmul", 3.5)
    assert found.heaviest[1] == ("ncclDevKernel_AllGather", "gather", 2.5)
    assert found.gaps == ((2.5, "CopyFunctor<float, c10::BFloat16, 2", "nvjet_b"),)


def test_a_line_of_the_table_has_all_columns() -> None:
    cells = Profile.of([Activity("nvjet", 0, 2000)], 1).cells()
    assert dict(zip(COLUMNS, cells, strict=True))["matmul"] == "2.0"
    assert set(cells) == {"2.0", "0.0"}


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": list(OTHER_EVENTS)}))
    with pytest.raises(
        ValueError, match="0 activities of a GPU in 3 steps: a profile needs at least one of each"
    ):
        Profile.read(tmp_path / "trace.json", 3)
