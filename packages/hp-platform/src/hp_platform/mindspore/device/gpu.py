"""GPUs under MindSpore, through its public API. Not run on hardware."""

from __future__ import annotations

from hp_platform.mindspore.device._accelerator import AcceleratorDevice


class GpuDevice(AcceleratorDevice):
    """Handle of ``"cuda"``."""

    name = "cuda"
    target = "GPU"
    comm_backend = "nccl"
    # Which kernels MindSpore's GPU build has was not tried: nothing is promised that its CPU build lacks.
    missing = frozenset(
        {
            "stand_ins",
            "undefined_gradients",
            "backward_turns",
            "bfloat16_compute",
            "in_place_arithmetic",
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
