"""What a distributed test is told of the place where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_platform.group import ProcessGroup


@dataclass(frozen=True)
class World:
    """The argument ``world`` of a distributed test, on one rank."""

    rank: int
    size: int
    backend: str
    """``torch``, ``cuda``, ``npu``, ``mindspore`` or ``plain``."""
    device_type: str
    """``cpu``, ``cuda`` or ``npu``."""
    device: str
    """The device of this rank, such as ``cuda:1``."""
    platform: Any
    """The :class:`hp_platform.platform.Platform` of the worker; None on backend ``plain``."""
    group: ProcessGroup | None
    """The default process group; None if the test asked for ``init=False``, and on backend ``plain``."""
