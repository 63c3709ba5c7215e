"""Collectives, written once for all frameworks over the raw launches of :class:`hp_platform.protocols.CommOps`.

Every function takes a :class:`hp_platform.ProcessGroup` (default: the world), returns its result (inputs stay as they are,
and need not be contiguous), does nothing in a group of one rank, is counted by
:func:`hp_platform.record_collectives`, and ends with :class:`CollectiveTimeoutError` naming itself and the missing
rank if a peer does not come. ``async_op=True`` gives a :class:`Work` instead. None of them is differentiable;
:mod:`hp_platform.collectives.differentiable` has those that are.
"""

from hp_platform.collectives._launch import CollectiveTimeoutError, Work
from hp_platform.collectives.coalesced import (
    all_gather_coalesced,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
)
from hp_platform.collectives.exchange import P2POp, all_to_all, barrier, batch_send_recv, recv, send
from hp_platform.collectives.gather import all_gather, all_gather_uneven, broadcast, gather, scatter
from hp_platform.collectives.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from hp_platform.collectives.reduce import (
    REDUCE_OPS,
    all_reduce,
    normalize_op,
    reduce_scatter,
    reduce_scatter_uneven,
)

__all__ = [
    "REDUCE_OPS",
    "CollectiveTimeoutError",
    "P2POp",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_object",
    "all_gather_uneven",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "batch_send_recv",
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "normalize_op",
    "recv",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_uneven",
    "scatter",
    "scatter_object",
    "send",
]
