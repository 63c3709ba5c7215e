"""How tensors travel: as flat rows of numbers that MindSpore's communication knows; and the handle of what is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import mint

from hp_platform.mindspore._dtypes import ITEMSIZE, NAME_OF
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._write import write

# The same bits under another name. What is not listed is moved as it is.
_CARRIERS = {
    "bool": mindspore.uint8,
    "int16": mindspore.float16,
    "uint16": mindspore.float16,
    "uint32": mindspore.int32,
    "uint64": mindspore.int64,
    "complex64": mindspore.int64,
    "complex128": mindspore.float64,
}
_INTEGERS = {1: mindspore.int8, 2: mindspore.int16, 4: mindspore.int32, 8: mindspore.int64}


def carried(x: mindspore.Tensor) -> mindspore.Tensor:
    """The bits of a contiguous tensor in one row of a dtype that can be moved; a view."""
    row = x.view((x.size,))
    carrier = _CARRIERS.get(NAME_OF[x.dtype])
    return row if carrier is None else row.view(carrier)


def integers(x: mindspore.Tensor) -> mindspore.Tensor:
    """The bits of a contiguous tensor in one row of integers, which add without rounding; a view."""
    row = carried(x)
    return row.view(_INTEGERS[ITEMSIZE[NAME_OF[row.dtype]]])


def is_whole(x: mindspore.Tensor) -> bool:
    """Whether the tensor is all of its memory: MindSpore's collectives lose what they write into part of a tensor."""
    return x.is_contiguous() and x.untyped_storage().size() == x.size * ITEMSIZE[NAME_OF[x.dtype]]


def fill(x: mindspore.Tensor, row: mindspore.Tensor) -> None:
    """Write a carried row (or one of ``x``'s own dtype) into a contiguous tensor."""
    with no_grad():
        target = x.view((x.size,))
        write(target if row.dtype == x.dtype else target.view(row.dtype), row)


def padded(row: mindspore.Tensor, length: int) -> mindspore.Tensor:
    """``row`` with anything behind it up to ``length``."""
    if row.size == length:
        return row
    return mint.cat([row, mint.empty((length - row.size,), dtype=row.dtype)])


class Launch:
    """One kernel that was started: MindSpore's handle (None if it has run), and the check that all ranks were in it."""

    __slots__ = ("_handle", "check")

    def __init__(self, handle: Any, check: Callable[[], None]) -> None:
        self._handle = handle
        self.check = check

    def wait(self) -> None:
        """Later work of this process begins after the kernel."""
        if self._handle is not None:
            self._handle.wait()


def nothing() -> None:
    """Nothing to check, or to finish."""


NO_LAUNCH = Launch(None, nothing)
"""Of empty tensors."""


class Work:
    """A launch under way: its kernels, what to do when they are done, and how to wait for the device's queue.

    On CPU waiting drains the queue, so that a failure is raised here and not at some later operation. MindSpore cannot be
    asked whether a launch has finished, so :meth:`is_completed` waits as well.
    """

    def __init__(
        self, launches: Sequence[Launch], finish: Callable[[], None], drain: Callable[[], None]
    ) -> None:
        self._launches = tuple(launches)
        self._finish = finish
        self._drain = drain
        self._done = False
        self._error: Exception | None = None

    def wait(self) -> None:
        """The output is ready. Raises what MindSpore reports."""
        if not self._done:
            self._done = True
            try:
                self._run()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """True, after waiting; a failure is kept for :meth:`wait`."""
        if not self._done:
            try:
                self.wait()
            except Exception as error:
                assert error is self._error
        return True

    def _run(self) -> None:
        launches, finish = self._launches, self._finish
        # Whatever happens, the tensors that they hold are free afterwards.
        self._launches, self._finish = (), nothing
        for launch in launches:
            launch.wait()
        self._drain()
        for launch in launches:
            launch.check()
        finish()
        self._drain()


def started(
    launches: Sequence[Launch], finish: Callable[[], None], drain: Callable[[], None], *, async_op: bool
) -> Work | None:
    """The handle of what was launched, or None when it is finished."""
    work = Work(launches, finish, drain)
    if async_op:
        return work
    work.wait()
    return None
