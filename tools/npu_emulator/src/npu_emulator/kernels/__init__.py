"""CPU kernels behind the npu device, for a process whose CANN is the emulated one.

=======================  ========================================================================================
`_streams`               the current stream: waiting for it, and writing results late
`_memory`                NPU memory seen as a CPU tensor, and back
`_random`                CPU generators that follow the state of the NPU generator
`_aten`                  one kernel for every aten operator that torch_npu implements
`_fused`                 registration of the fused npu:: operators, defined in:
`_norms`, `_attention`, `_moe`
=======================  ========================================================================================

`calls` counts by operator name; a test reads it to see which kernels ran.
"""

from npu_emulator import _activation

if not _activation.is_active():
    raise ImportError(
        "npu_emulator.kernels replaces the kernels of torch_npu and only works over the emulated CANN: "
        "set NPU_EMULATOR=1 and `import torch_npu`"
    )

from npu_emulator.kernels._calls import calls

__all__ = ["calls", "install"]


def install() -> None:
    """Register all kernels. Called once, after `import torch_npu`."""
    from npu_emulator.kernels import _aten, _attention, _fused, _moe, _norms  # noqa: F401  (define fused operators)

    _aten.install()
    _fused.install()
