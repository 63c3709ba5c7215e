"""What this rank holds of a tensor that may be a DTensor or a plain one."""

from __future__ import annotations

from typing import Any

from hp_platform.protocols.tensor import Tensor


def local_of(x: Any) -> Tensor:
    """The local tensor of a DTensor; a plain tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def like(x: Any, local: Tensor) -> Any:
    """``local`` placed as the DTensor ``x``; itself if ``x`` is a plain tensor. No communication."""
    if not hasattr(x, "to_local"):
        return local
    return type(x).from_local(local, x.device_mesh, x.placements, shape=tuple(x.shape))
