"""Waiting for the reductions of all sharded models."""

from __future__ import annotations

from typing import Any

from hp_fsdp.runtime import RootContext
from hp_platform import _process


def hsdp_sync_stream() -> Any:
    """Wait until all reductions of all sharded models of the process are over, for what the computation does next.

    Needed only after ``set_is_last_backward(False)``: else the end of backward has waited. The host waits only where the
    device has no streams. Returns the stream that reductions run on, of the model that was first called last; None where
    devices have none (cpu) or nothing has run. Communication: none of its own; on devices without streams the all-reduce of
    replicas is launched by whoever waits.
    """
    stream = None
    contexts: list[RootContext] = sorted(_process.state.sharded_roots, key=lambda context: context.number)
    for context in contexts:
        with context.platform.no_grad():
            context.drain()
        if context.streams.are_real:
            stream = context.streams.reduce
    return stream
