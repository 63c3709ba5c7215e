"""The tests run over the emulation: `NPU_EMULATOR=1 python -m pytest`, after `python -m npu_emulator.build`."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("NPU_EMULATOR") != "1":
        raise pytest.UsageError(
            "these tests need the emulation: run them with NPU_EMULATOR=1 in the environment"
        )


@pytest.fixture
def npu():
    """The device, with the current stream idle and nothing left from the test before."""
    import torch
    import torch_npu  # noqa: F401

    torch.npu.synchronize()
    torch.manual_seed(0)
    return torch.device("npu", torch.npu.current_device())
