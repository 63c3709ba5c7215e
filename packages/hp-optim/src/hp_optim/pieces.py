"""What this rank holds of a tensor that may be a DTensor or a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_platform.protocols.tensor import Tensor


def local_of(x: Any) -> Tensor:
    """The local tensor of a DTensor; a plain tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def like(x: Any, local: Tensor) -> Any:
    """``local`` placed as the DTensor ``x``; itself if ``x`` is a plain tensor. No communication."""
    return placed(x, local)


def placed(x: Any, local: Tensor, placements: Sequence[Any] | None = None) -> Any:
    """``local`` as a DTensor on the mesh and of the shape of ``x``, in its or other placements; itself if ``x`` is a plain tensor.

    No communication. ValueError if ``local`` is not this rank's piece.
    """
    if not hasattr(x, "to_local"):
        return local
    wanted = x.placements if placements is None else placements
    return type(x).from_local(local, x.device_mesh, wanted, shape=tuple(x.shape))
