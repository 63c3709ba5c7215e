"""How a collective is started, recorded, waited for, and how its failure is told. All collectives go through :func:`launch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from hp_platform import _process, diagnosis, keeping, recording
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform, get_platform
from hp_platform.process_groups import resolve as resolve
from hp_platform.protocols.comm import NativeWork
from hp_platform.protocols.tensor import Tensor

T = TypeVar("T")


class CollectiveTimeoutError(RuntimeError):
    """A peer did not join a collective in time, or is gone. The text names the collective and the ranks that are missing."""


class Work(Generic[T]):
    """A collective that is under way; :meth:`wait` gives its result."""

    __slots__ = ("__weakref__", "_describe", "_finish", "_group", "_native", "_result")

    def __init__(
        self,
        native: NativeWork | None,
        finish: Callable[[], T],
        group: ProcessGroup,
        describe: Callable[[], str],
    ) -> None:
        self._native = native
        self._finish: Callable[[], T] | None = finish
        self._group = group
        self._describe = describe
        self._result: Any = None

    def wait(self) -> T:
        """The result, ready for what the current stream does next (the host does not wait for the device). May be called again."""
        if self._finish is not None:
            if self._native is not None:
                try:
                    self._native.wait()
                except Exception as error:
                    raise _told(error, self._group, self._describe) from error
            self._result = self._finish()
            self._finish = self._native = None
        return self._result

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._native is None or self._native.is_completed()


def finished(result: T, group: ProcessGroup) -> Work[T]:
    """The handle of something that needed no communication."""
    return Work(None, lambda: result, group, str)


@overload
def launch(
    kind: str,
    group: ProcessGroup,
    nbytes: int,
    start: Callable[[bool], NativeWork | None],
    finish: Callable[[], T],
    async_op: Literal[True],
    num_tensors: int = 1,
    *,
    is_own: bool = ...,
) -> Work[T]: ...
@overload
def launch(
    kind: str,
    group: ProcessGroup,
    nbytes: int,
    start: Callable[[bool], NativeWork | None],
    finish: Callable[[], T],
    async_op: bool,
    num_tensors: int = 1,
    *,
    is_own: bool = ...,
) -> T | Work[T]: ...
def launch(
    kind: str,
    group: ProcessGroup,
    nbytes: int,
    start: Callable[[bool], NativeWork | None],
    finish: Callable[[], T],
    async_op: bool,
    num_tensors: int = 1,
    *,
    is_own: bool = True,
) -> T | Work[T]:
    """Start one collective on a group of several ranks.

    ``start(async_op)`` is the raw launch; ``finish()`` makes the result of the filled buffers, after waiting. ``is_own`` False: the
    result is memory of the caller's, which no keeper keeps (see [Note: keepers] in :mod:`hp_platform.keeping`).
    """
    keepers = keeping.present() if is_own else ()
    if not keepers:
        return _launched(kind, group, nbytes, start, finish, async_op, num_tensors)
    kept = keeping.KeptLaunch(keepers, recording.Launch(kind, nbytes, group, num_tensors))
    with kept.quiet():
        found = kept.taken()
        if found is not None:
            result: T = found[0]
            return finished(result, group) if async_op else result
        launched = _launched(kind, group, nbytes, start, kept.noting(finish), async_op, num_tensors)
    if isinstance(launched, Work):
        kept.expect(launched.wait)
    return launched


def _launched(
    kind: str,
    group: ProcessGroup,
    nbytes: int,
    start: Callable[[bool], NativeWork | None],
    finish: Callable[[], T],
    async_op: bool,
    num_tensors: int,
) -> T | Work[T]:
    describe = _counted(kind, group, nbytes, num_tensors)
    try:
        native = start(async_op)
    except Exception as error:
        raise _told(error, group, describe) from error
    if async_op:
        return Work(native, finish, group, describe)
    return finish()


def run_as(kind: str, group: ProcessGroup, nbytes: int, run: Callable[[], None], num_tensors: int) -> None:
    """``run()``, which counts as a collective and gives no result: no keeper is asked."""
    describe = _counted(kind, group, nbytes, num_tensors)
    try:
        run()
    except Exception as error:
        raise _told(error, group, describe) from error


def _counted(kind: str, group: ProcessGroup, nbytes: int, num_tensors: int) -> Callable[[], str]:
    """Count a launch that is about to start; what describes it."""
    if group.native is None:
        raise RuntimeError(
            f"{kind} on the {group.describe()}, which was ended by destroy_process_group: make groups and meshes anew"
        )
    if _process.open_recorders.records:
        recording.note(recording.Launch(kind, nbytes, group, num_tensors))
    number = diagnosis.count_launch(group, kind)
    return lambda: f"{kind} number {number} on the {group.describe()}, {nbytes:,} bytes"


def _told(error: Exception, group: ProcessGroup, describe: Callable[[], str]) -> Exception:
    if not get_platform().is_timeout(error):
        text = f"{describe()} failed on rank {group.global_rank}, whose backend is {group.backend}: {error}"
        waited = diagnosis.said_before(group)
        return CollectiveTimeoutError(f"{text}\nBefore that, {waited}") if waited else RuntimeError(text)
    return CollectiveTimeoutError(
        f"{describe()} was not joined by every rank within {group.timeout.total_seconds():g} s, or a rank is gone.\n"
        f"{diagnosis.who_is_missing(group)}"
    )


def payload(platform: Platform, x: Tensor) -> Tensor:
    """``x`` as it can travel: outside of the graph, contiguous, bool as bytes. ValueError if it has no memory."""
    if device_type(platform, x) == "meta":
        raise ValueError(
            f"a meta tensor of shape {tuple(x.shape)} has no data to communicate: put it on a device first"
        )
    x = platform.contiguous(platform.detach(x))
    return platform.cast(x, "uint8") if is_bool(platform, x) else x


def is_bool(platform: Platform, x: Tensor) -> bool:
    """Whether the tensor holds truth values, for which backends have no collectives."""
    return platform.dtype_name(x.dtype) == "bool"


def nbytes(platform: Platform, x: Tensor) -> int:
    """Bytes of the elements."""
    return math.prod(x.shape) * platform.itemsize(x.dtype)


def device_type(platform: Platform, x: Tensor) -> str:
    """``cpu``, ``cuda`` or ``npu``."""
    return platform.device_of(x).partition(":")[0]


def output(
    platform: Platform, like: Tensor, shape: Sequence[int], out: Tensor | None
) -> tuple[Tensor, Callable[[], Tensor]]:
    """A buffer that the backend may fill, like the payload ``like``; and how the caller's result is made of it.

    ``out`` None: the buffer is the result. A whole contiguous ``out`` of the right dtype is filled directly, any other is
    written at the end.
    """
    if out is None:
        buffer = platform.empty(shape, like.dtype, platform.device_of(like))
        return buffer, lambda: buffer
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out has shape {tuple(out.shape)}, expected {tuple(shape)}")
    if out.dtype == like.dtype and platform.is_contiguous(out):
        target = platform.detach(out)
        return target, lambda: out
    buffer = platform.empty(shape, like.dtype, platform.device_of(like))
    return buffer, lambda: platform.copy_(out, buffer)


def alone(
    platform: Platform, x: Tensor, out: Tensor | None, group: ProcessGroup, async_op: bool
) -> Tensor | Work[Tensor]:
    """The result in a group of one rank: ``x`` itself, written to ``out`` if that is given."""
    result = platform.detach(x)
    if out is not None:
        if tuple(out.shape) != tuple(x.shape):
            raise ValueError(f"out has shape {tuple(out.shape)}, expected {tuple(x.shape)}")
        if out is not x:
            platform.copy_(out, result)
        result = out
    return finished(result, group) if async_op else result


def check_member(group: ProcessGroup, rank: int, name: str) -> None:
    """ValueError unless ``rank`` (a global one) is in the group."""
    if rank not in group.ranks:
        raise ValueError(
            f"{name} is a global rank of the group: got {rank}, the {group.describe()} does not hold it"
        )
