"""How the end of a backward is noticed, also of one that fails.

[Note: backwards that fail] An exception that leaves a backward calls nobody back, but the framework drops what was to be called at
the end, before the caller sees the exception (in torch's threads of devices perhaps a moment later). That shows shards and
frees what is whole. It waits for nothing, as it may run in a thread of the framework's: what is on its way, gathers and
reductions, is ended by whoever comes next.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_fsdp.runtime import RootContext


class EndOfBackward:
    """Called when a backward is over. Only the backward holds it, so its end is known also where nothing is called."""

    def __init__(self, context: RootContext) -> None:
        self._context = context

    def __call__(self) -> None:
        self._context.end_backward()


def queue_end(context: RootContext) -> weakref.ref[EndOfBackward]:
    """Have the context called at the end of the backward that is running: a function, so that no traceback holds it beside that."""
    end = EndOfBackward(context)
    context.platform.queue_backward_callback(end)
    return weakref.ref(end, functools.partial(_end_is_gone, weakref.ref(context)))


def _end_is_gone(context: weakref.ref[RootContext], end: weakref.ref[EndOfBackward]) -> None:
    found = context()
    if found is not None:
        found.end_is_gone(end)


def nothing() -> None:
    """Queued to ask whether a backward is running."""
