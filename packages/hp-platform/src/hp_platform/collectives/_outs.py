"""Where the results of a collective on several tensors go: into new tensors, or into those that the caller gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hp_platform.collectives._launch import Work, finished
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

Shapes = Sequence[tuple[int, ...]]


def check_outs(
    platform: Platform, xs: Sequence[Tensor], shapes: Shapes, outs: Sequence[Tensor] | None
) -> None:
    """ValueError unless ``outs`` can be the results: one per tensor of ``xs``, of its dtype and device, of the shape in ``shapes``."""
    if outs is None:
        return
    if len(outs) != len(xs):
        raise ValueError(f"outs needs one tensor per tensor of xs: got {len(outs)} for {len(xs)}")
    for i, (out, x, shape) in enumerate(zip(outs, xs, shapes, strict=True)):
        given, wanted = _shown(platform, out, tuple(out.shape)), _shown(platform, x, shape)
        if given != wanted:
            raise ValueError(f"outs[{i}] is {given}, the result is {wanted}: give a tensor like that")
        if not platform.is_contiguous(out):
            raise ValueError(
                f"outs[{i}] of shape {shape} is not contiguous: give a contiguous tensor, or leave outs away and copy"
            )


def _shown(platform: Platform, x: Tensor, shape: tuple[int, ...]) -> str:
    return f"{shape} {platform.dtype_name(x.dtype)} on {platform.device_of(x)}"


def buffers_for(
    platform: Platform,
    data: Sequence[Tensor],
    shapes: Shapes,
    outs: Sequence[Tensor] | None,
    truth: bool,
) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """What the backend may fill, for payloads ``data``; and how the caller's results are made of it, after waiting.

    ``outs`` themselves, without a copy, unless they hold truth values, which travel as bytes.
    """
    if outs is not None and not truth:
        return [platform.detach(out) for out in outs], lambda: list(outs)
    device = platform.device_of(data[0])
    buffers = [platform.empty(s, x.dtype, device) for s, x in zip(shapes, data, strict=True)]
    return buffers, lambda: delivered(platform, buffers, outs, truth)


def delivered(
    platform: Platform, results: list[Tensor], outs: Sequence[Tensor] | None, truth: bool
) -> list[Tensor]:
    """The caller's results: ``results`` (bytes where they stand for ``truth``), written to ``outs`` if there are any."""
    if outs is None:
        return platform.foreach_cast(results, "bool") if truth else results
    platform.foreach_copy_(outs, results)
    return list(outs)


def all_alone(platform: Platform, xs: Sequence[Tensor], outs: Sequence[Tensor] | None) -> list[Tensor]:
    """The results in a group of one rank: ``xs`` themselves, written to ``outs`` if there are any."""
    results = [platform.detach(x) for x in xs]
    if outs is None:
        return results
    pairs = [(out, x) for out, x in zip(outs, results, strict=True) if not _is_same(platform, out, x)]
    platform.foreach_copy_([out for out, _ in pairs], [x for _, x in pairs])
    return list(outs)


def _is_same(platform: Platform, out: Tensor, x: Tensor) -> bool:
    return platform.is_contiguous(x) and platform.data_ptr(out) == platform.data_ptr(x)


def ended(results: list[Tensor], group: ProcessGroup, async_op: bool) -> list[Tensor] | Work[list[Tensor]]:
    """``results`` of what needs no launch, as the caller asked for them."""
    return finished(results, group) if async_op else results
