"""Names and keywords of the installed torch_npu that hyper-parallel's npu device uses."""

import inspect

import pytest
import torch
import torch_npu

#: name in torch.npu -> keywords that are passed
DEVICE_API: dict[str, set[str]] = {
    "is_available": set(),
    "device_count": set(),
    "current_device": set(),
    "set_device": {"device"},
    "synchronize": {"device"},
    "Stream": set(),
    "Event": {"enable_timing"},
    "current_stream": {"device"},
    "stream": set(),
    "manual_seed": {"seed"},
    "manual_seed_all": {"seed"},
    "get_rng_state": {"device"},
    "set_rng_state": {"new_state", "device"},
    "memory_allocated": {"device"},
    "max_memory_allocated": {"device"},
    "memory_reserved": {"device"},
    "reset_peak_memory_stats": {"device"},
    "memory_stats": {"device"},
    "empty_cache": set(),
    "mem_get_info": {"device"},
    "get_device_name": set(),
    "is_bf16_supported": set(),
}

OPERATORS: dict[str, set[str]] = {
    "npu_rms_norm": {"input", "gamma", "epsilon"},
    "npu_swiglu": {"input", "dim"},
    "npu_rotary_mul": {"input", "r1", "r2", "rotary_mode"},
    "npu_fusion_attention": {
        "query", "key", "value", "head_num", "input_layout", "atten_mask", "scale", "keep_prob", "sparse_mode",
        "actual_seq_qlen", "actual_seq_kvlen",
    },
    "npu_moe_token_permute": {"tokens", "indices", "num_out_tokens"},
    "npu_moe_token_unpermute": {"permuted_tokens", "sorted_indices", "probs"},
    "npu_grouped_matmul": {"x", "weight", "group_list", "split_item", "group_type", "group_list_type"},
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICE_API)
def test_device_function_takes_its_keywords(name: str) -> None:
    function = getattr(torch.npu, name)
    if not DEVICE_API[name] or name == "set_device":
        assert callable(function)
        return
    target = function.__new__ if inspect.isclass(function) else function
    parameters = inspect.signature(target).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert accepts_any or DEVICE_API[name] <= set(parameters), f"{name}{inspect.signature(target)}"


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_its_arguments(name: str) -> None:
    assert callable(getattr(torch_npu, name))
    schema = getattr(torch.ops.npu, name).default._schema
    assert OPERATORS[name] <= {argument.name for argument in schema.arguments}


def test_hccl_is_the_backend_of_the_device() -> None:
    backend = torch.distributed.Backend
    assert "hccl" in backend.backend_list
    assert backend.default_device_backend_map["npu"] == "hccl"


def test_accelerator_api_knows_the_device() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "npu"
