"""Collectives for runtimes that launch the same thing every step, and have checked it when they planned it.

The host's time of a step goes into such launches: looking at every tensor once more costs more than the launch itself. So
nothing is looked at here. The caller vouches: a group of several ranks, a backend that coalesces (``platform.can_coalesce``)
where there are several tensors, contiguous tensors outside of any graph, of one dtype that the backend moves and reduces, not
truth values, at least one with elements, results that fit. Launches are recorded and counted as all others are.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_platform.collectives._launch import Work, launch, run_as
from hp_platform.group import ProcessGroup
from hp_platform.platform import get_platform
from hp_platform.protocols.tensor import Tensor


def all_gather_into_each(
    outs: Sequence[Tensor], xs: Sequence[Tensor], group: ProcessGroup, nbytes: int, async_op: bool
) -> Work[None] | None:
    """``outs[i]`` (ranks * n_i elements) become the ranks' ``xs[i]`` (n_i). ``nbytes`` of all ``outs`` together.

    With ``async_op`` the handle; else None, after a launch on the current stream where the device has streams.
    """
    platform, native = get_platform(), group.native
    return launch(
        "all_gather",
        group,
        nbytes,
        lambda a: platform.all_gather_coalesced_into(outs, xs, native, a),
        _nothing,
        async_op,
        len(xs),
        is_own=False,
    )


def reduce_scatter_into_each(
    outs: Sequence[Tensor], xs: Sequence[Tensor], op: str, group: ProcessGroup, nbytes: int, async_op: bool
) -> Work[None] | None:
    """``outs[i]`` (n_i elements) become this rank's blocks of the reductions of ``xs[i]``. ``nbytes`` of all ``xs`` together.

    ``op``: one that the backend has (``platform.native_reduce_ops``). The result as of :func:`all_gather_into_each`.
    """
    platform, native = get_platform(), group.native
    return launch(
        "reduce_scatter",
        group,
        nbytes,
        lambda a: platform.reduce_scatter_coalesced_into(outs, xs, op, native, a),
        _nothing,
        async_op,
        len(xs),
        is_own=False,
    )


def all_to_all_into(
    out: Tensor, x: Tensor, group: ProcessGroup, nbytes: int, async_op: bool
) -> Work[None] | None:
    """``out`` becomes the ranks' blocks for this rank, one after the other, as many as ``x`` has for them: all of one size.

    The result as of :func:`all_gather_into_each`.
    """
    platform, native = get_platform(), group.native
    sizes = [x.shape[0] // group.size] * group.size
    return launch(
        "all_to_all",
        group,
        nbytes,
        lambda a: platform.all_to_all_into(out, x, sizes, sizes, native, a),
        _nothing,
        async_op,
        is_own=False,
    )


def can_exchange_each(device_type: str) -> bool:
    """Whether :func:`all_to_all_into_each` is possible for tensors of such a device."""
    return get_platform().can_exchange_lists(device_type)


def all_to_all_into_each(
    outs: Sequence[Sequence[Tensor]],
    xs: Sequence[Sequence[Tensor]],
    group: ProcessGroup,
    nbytes: int,
    async_op: bool,
) -> Work[None] | None:
    """``outs[i][r]`` become what rank r has for this one: its ``xs[i][own rank]``. ``nbytes`` of all ``xs`` together.

    The caller vouches for :func:`can_exchange_each` instead of a backend that coalesces. The result as of :func:`all_gather_into_each`.
    """
    platform, native = get_platform(), group.native
    return launch(
        "all_to_all",
        group,
        nbytes,
        lambda a: platform.all_to_all_coalesced_into(outs, xs, native, a),
        _nothing,
        async_op,
        len(xs),
        is_own=False,
    )


by_copies = run_as
"""``run()`` does on the current stream, by copies in peer memory, what the collective ``kind`` would do."""


def _nothing() -> None:
    """Results lie where they were wanted."""
