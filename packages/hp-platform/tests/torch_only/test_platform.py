"""What only the torch backend has to get right: torch's own quirks behind the platform's functions."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hp_platform.torch import TorchPlatform, build_platform


@pytest.fixture(scope="module")
def platform() -> TorchPlatform:
    return build_platform()


def test_functions_that_torch_has_are_torchs_own(platform: TorchPlatform) -> None:
    assert platform.matmul is torch.matmul
    assert platform.linear is torch.nn.functional.linear
    assert platform.Module is torch.nn.Module
    assert platform.no_grad is torch.no_grad


def test_every_torch_dtype_with_a_name_is_known(platform: TorchPlatform) -> None:
    for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "complex128"):
        assert platform.dtype_name(platform.dtype(name)) == name
    x = torch.tensor([1.5, -2.0]).to(torch.float8_e5m2)
    assert platform.to_numpy(x).tolist() == [1.5, -2.0]
    scale = torch.tensor([0.5, 4.0]).to(torch.float8_e8m0fnu)
    assert platform.dtype_name(scale.dtype) == "float8_e8m0fnu"
    assert platform.to_numpy(scale).tolist() == [0.5, 4.0]
    assert platform.to_numpy(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


def test_a_read_only_array_and_a_tensor_become_tensors_without_a_warning(platform: TorchPlatform) -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert platform.tensor(array).tolist() == [0.0, 1.0, 2.0]
    source = torch.ones(2, requires_grad=True)
    copy = platform.tensor(source, "float64")
    assert (copy.dtype, copy.requires_grad) == (torch.float64, False)
    assert platform.tensor(source).data_ptr() != source.data_ptr()


def test_defaults_do_not_follow_torchs_default_dtype(platform: TorchPlatform) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert (
            platform.zeros((1,)).dtype
            == platform.empty((1,)).dtype
            == platform.full((1,), 2).dtype
            == torch.float32
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_lists_that_do_not_pair_up_are_refused(platform: TorchPlatform) -> None:
    with pytest.raises(ValueError, match="1 and 2"):
        platform.foreach_copy_([torch.ones(1)], [torch.ones(1)] * 2)
    with pytest.raises(ValueError, match="1 and 0"):
        platform.foreach_split([torch.ones(1)], [])


def test_the_gradient_of_a_result_is_refused_rather_than_missing(platform: TorchPlatform) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    with pytest.raises(ValueError, match="keeps no gradient"):
        platform.get_grad(y)
    y.retain_grad()
    platform.backward([y.sum()])
    grad = platform.get_grad(y)
    assert grad is not None
    assert grad.tolist() == [1.0, 1.0]


def test_a_recurrent_layer_computes_with_the_tensor_put_in_a_parameters_place(
    platform: TorchPlatform,
) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(2, 2), torch.ones(3, 1, 2)
    before, parameter = layer(x)[0].detach(), layer.weight_hh_l0
    platform.set_parameter(layer, "weight_hh_l0", torch.zeros(8, 2))
    assert not torch.equal(layer(x)[0], before)
    platform.set_parameter(layer, "weight_hh_l0", parameter)
    assert torch.equal(layer(x)[0], before)
    assert [name for name, _ in layer.named_parameters()][1] == "weight_hh_l0"


def test_modules_of_torch_are_walked_like_our_own(platform: TorchPlatform) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert [name for name, _ in platform.named_parameters(model)] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    assert next(iter(dict(platform.named_buffers(model)))) == "1.running_mean"
    platform.set_submodule(model, "1", torch.nn.Identity())
    assert isinstance(model[1], torch.nn.Identity)


def test_an_absent_device_says_what_is_missing(platform: TorchPlatform) -> None:
    for kind in {"cuda", "npu"} - set(platform.device_types()):
        with pytest.raises(RuntimeError) as caught:
            platform.device(kind)
        message = str(caught.value)
        assert f"'{kind}'" in message
        assert "available: " in message
        assert "cpu" in message
        assert any(
            reason in message
            for reason in ("built without CUDA", "sees no", "not installed", "does not load")
        )


def test_torch_npu_without_cann_is_an_absent_device(tmp_path: Any) -> None:
    # A package of that name which fails as the real one does where CANN's libraries are missing.
    (tmp_path / "torch_npu.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    script = (
        "from hp_platform.torch import build_platform\n"
        "p = build_platform()\n"
        "assert 'npu' not in p.device_types(), p.device_types()\n"
        "try:\n    p.device('npu')\nexcept RuntimeError as e:\n    print(e)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "NPU_EMULATOR": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "torch_npu does not load: libhccl.so: cannot open shared object file" in result.stdout


@pytest.mark.parametrize("async_op", [True, False])
def test_a_coalesced_launch_says_whether_a_handle_is_wanted(platform: TorchPlatform, async_op: bool) -> None:
    """NCCL runs on the current stream only if it is told so: torch 2.11's own manager forgets it for all_gather."""
    told, work = [], SimpleNamespace(wait=lambda: told.append("waited"))

    def launch(*arguments: Any) -> Any:
        told.append(arguments[-1].asyncOp)
        return work

    # Names of torch 2.11, and those of 2.13.
    scatter, gather = "reduce_scatter_{}_coalesced", "all{}gather_{}_coalesced"
    names = ("allreduce_coalesced", scatter.format("tensor"), scatter.format("single"))
    names = (*names, gather.format("", "into_tensor"), gather.format("_", "single"))
    group, x = SimpleNamespace(**dict.fromkeys(names, launch)), torch.zeros(2)
    group.alltoall, group._start_coalescing, group._end_coalescing = (
        launch,
        lambda device: None,
        lambda device: work,
    )
    for made in (
        platform.all_gather_coalesced_into([torch.zeros(4)], [x], group, async_op),
        platform.reduce_scatter_coalesced_into([x], [torch.zeros(4)], "sum", group, async_op),
        platform.all_reduce_coalesced_([x], "sum", group, async_op),
        platform.all_to_all_coalesced_into([[x, x]], [[x, x]], group, async_op),
    ):
        assert made is (work if async_op else None)
    assert told == ([True] * 4 if async_op else [False, "waited"] * 4)


def test_torchs_own_layers_initialise_themselves(platform: TorchPlatform) -> None:
    layers = [
        torch.nn.Linear(2, 3),
        torch.nn.LayerNorm(3),
        torch.nn.Embedding(4, 2),
        torch.nn.MultiheadAttention(4, 2),
        torch.nn.LSTM(2, 3),
    ]
    for layer in layers:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(100.0)
        assert platform.reset_parameters(layer)
        own = list(layer.parameters(recurse=False))
        assert own and all(parameter.detach().max().item() < 100.0 for parameter in own)
    assert not platform.reset_parameters(torch.nn.Sequential(layers[0]))


def test_a_layer_without_bias_says_so(platform: TorchPlatform) -> None:
    assert platform.get_parameter(torch.nn.Linear(2, 3, bias=False), "bias") is None


def test_host_memory_for_accelerators_is_page_locked(platform: TorchPlatform) -> None:
    for kind in platform.device_types():
        made = platform.device(kind).empty_pinned((4,), "float32")
        assert made.is_pinned() is (kind != "cpu")


def test_recordable_makes_tensors_for_training_inside_of_inference_mode(platform: TorchPlatform) -> None:
    with torch.inference_mode():
        assert (torch.ones(2) * 2).is_inference()
        with platform.recordable():
            kept = torch.ones(2) * 2
            assert not kept.is_inference()
            assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
    x = torch.ones(2, requires_grad=True)
    (x * kept).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_of_products_is_that_of_autocast(name: str) -> None:
    platform = build_platform()
    x = torch.ones((2, 2), dtype=getattr(torch, name))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert platform.product_dtype(x) == platform.matmul(x, x).dtype == platform.linear(x, x).dtype


def test_a_product_in_a_wider_dtype_is_that_also_where_autocast_narrows_products() -> None:
    platform = build_platform()
    x = torch.full((1, 3), 1.0 + 2**-7, dtype=torch.bfloat16)
    expected = platform.matmul_in(x, x.t(), "float32")
    assert expected.item() == 3 * (1 + 2**-7) ** 2  # which bfloat16 would round
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(platform.matmul_in(x, x.t(), "float32"), expected)
