"""Writes by functions for lists and by kernels, counted on every device.

torch_npu's functions for lists and kernels of our own write and count nothing, so that neither autograd nor whoever compares versions would notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def version_before(xs: Sequence[torch.Tensor]) -> int | None:
    """Of the first of some tensors that are about to be written; None where nothing is counted (``torch.inference_mode``)."""
    return None if xs[0].is_inference() else xs[0]._version


def count_writes(xs: Sequence[torch.Tensor], before: int | None) -> None:
    """Count a write to each, unless the function that wrote has."""
    if before is not None and xs[0]._version == before:
        torch.autograd.graph.increment_version(xs)
