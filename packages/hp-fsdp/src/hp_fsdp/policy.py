"""Mixed precision: in which dtypes a unit computes, reduces and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit. Shards, gradients of shards and optimizer states keep the parameters' original dtype.

    Dtypes are names (``"bfloat16"``) or the framework's own objects; None: as it is. They concern floating-point tensors only.
    """

    param_dtype: Any = None
    """Of the gathered parameters, and so of the computation. Default: the original dtype."""
    reduce_dtype: Any = None
    """In which gradients travel and are averaged. Default: the dtype of the gathered parameters."""
    output_dtype: Any = None
    """Of the floating-point tensors in what forward returns. Default: as computed. It is for the root: layers behind an inner
    unit that has it would get this dtype, where they are no units themselves."""
    cast_forward_inputs: bool = True
    """Whether floating-point tensors in forward's arguments are cast to ``param_dtype``."""
    apply_grad_on_fp32_main_grad: bool = False
    """Keep reduced gradients in the dtype of the reduction, in ``parameter.main_grad``, and leave ``.grad`` None. Optimizers and
    clipping must read it, as hp-optim's do; the framework's own look at ``.grad`` alone, and do nothing."""
    weight_grads_in_reduce_dtype: bool = False
    """Weight gradients of linear layers come from their product in ``reduce_dtype``: rounded once less. They are sent in it
    too, which is twice the bytes of gradients that come in a 16-bit ``param_dtype``. First derivatives only; needs the
    capability ``stand_ins`` (torch), ValueError elsewhere."""

    def resolve(self, platform: Platform) -> Precision:
        """The policy in the framework's dtypes. ValueError names the field that is not a floating-point dtype."""
        found: dict[str, DType | None] = {}
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            given = getattr(self, field)
            if given is None:
                found[field] = None
                continue
            dtype = platform.dtype(given)
            if not platform.is_floating(dtype):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field} must be a floating-point dtype, got {given!r}"
                )
            found[field] = dtype
        if self.weight_grads_in_reduce_dtype and not platform.supports("stand_ins"):
            raise ValueError(
                f"MixedPrecisionPolicy.weight_grads_in_reduce_dtype=True is not possible on {platform.platform_type.value}: nothing "
                "can take its linear function into its own hands there; leave it False"
            )
        return Precision(
            platform,
            self.cast_forward_inputs,
            self.apply_grad_on_fp32_main_grad,
            self.weight_grads_in_reduce_dtype,
            **found,
        )


@dataclass(frozen=True)
class Precision:
    """A policy on a framework."""

    platform: Platform
    cast_inputs: bool
    keeps_main_grad: bool
    wide_weight_grads: bool
    param_dtype: DType | None
    reduce_dtype: DType | None
    output_dtype: DType | None

    def compute_dtype(self, original: DType) -> DType:
        """Of a gathered parameter whose shards have dtype ``original``."""
        if self.param_dtype is None or not self.platform.is_floating(original):
            return original
        return self.param_dtype

    def reduction_dtype(self, original: DType) -> DType:
        """In which the gradient of such a parameter is reduced. Complex ones have no other dtype."""
        if self.platform.dtype_name(original).startswith("complex"):
            return original
        return self.reduce_dtype if self.reduce_dtype is not None else self.compute_dtype(original)

    @property
    def input_dtype(self) -> DType | None:
        """What floating-point arguments are cast to; None: nothing."""
        return self.param_dtype if self.cast_inputs else None


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards, their gradients, and so the optimizer's state lie: on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """... on the cpu: a piece travels to the device when its unit is gathered, its gradient back when it has been reduced.

    Optimizers step on the cpu then, and keep their state there. Per step and rank a unit's row of pieces is copied to the device
    before each gather (in the original dtype), and one line of gradients to the host (in the dtype of the reduction), beside
    the computation; the number and bytes of collectives stay as they are. The host waits at the end of forward until the
    pieces have been read, and at the end of backward (or in :func:`hp_fsdp.hsdp_sync_stream`) for the gradients.
    Gradients that wait for a synchronisation (``set_requires_gradient_sync(False)``, ``set_requires_all_reduce(False)``) wait on
    the device.

    ``fully_shard`` cuts parameters where they are, so the model may be on the cpu before: then give a mesh of the device.
    Norms of gradients and whole values of pieces are communicated from the cpu: a world that torch's ``init_process_group`` has
    made needs a backend for both, such as ``"cpu:gloo,cuda:nccl"``; the one that is made by itself has it.
    Moving parameters off the cpu afterwards is a RuntimeError with their names at the next forward. Without effect on a cpu mesh.
    """

    pin_memory: bool = True
    """Page-locked memory, so that copies run beside the computation. It counts against what the machine may lock."""
