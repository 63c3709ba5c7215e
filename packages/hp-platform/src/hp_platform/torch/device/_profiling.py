"""Ranges in the profiler's timeline that cost nothing while nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING: AbstractContextManager[Any] = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A named range, if a profiler is running."""
    # Entering a range costs several microseconds also without one.
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else _NOTHING
