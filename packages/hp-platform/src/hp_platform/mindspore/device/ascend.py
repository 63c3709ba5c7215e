"""Ascend under MindSpore, through its public API. Not run on hardware."""

from __future__ import annotations

from hp_platform.mindspore.device._accelerator import AcceleratorDevice


class AscendDevice(AcceleratorDevice):
    """Handle of ``"npu"``."""

    name = "npu"
    target = "Ascend"
    comm_backend = "hccl"
    missing = frozenset(
        {
            "stand_ins",
            "traced_collectives",
            "undefined_gradients",
            "backward_turns",
            "float64_compute",
            "reduce_float64",
            "coalesced",
            "peer_memory",
            "fused_adamw",
            "recorded_work",
            "numbers_on_device",
            "out_products",
            "version_counter",
            "double_backward",  # see [Note: second derivatives] in hp_platform.mindspore._autograd
            "torch_checkpoint",
            "optimizer_state",
            "function_modes",
            "operation_dispatch",
        }
    )
