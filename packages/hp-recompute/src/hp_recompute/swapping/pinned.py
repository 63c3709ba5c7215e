"""Memory of the host, page-locked, which is dear to get and so is used again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from hp_platform.protocols.tensor import Tensor


class HostPool:
    """Gives the smallest free piece that is large enough, and not more than twice as large; else a new one."""

    def __init__(self, empty: Callable[[int], Tensor], *, exact: bool) -> None:
        """``empty(nbytes)`` makes a piece. ``exact``: only pieces of just the size fit."""
        self._empty, self._largest = empty, 1 if exact else 2
        self._free: list[tuple[int, int, Tensor]] = []
        self._returned: deque[tuple[int, Tensor]] = deque()
        """Pieces come back from any thread, and in the middle of anything: whenever the last holder is gone."""
        self._number = 0
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Of all pieces, free and in use."""
        return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Of those that are free."""
        self._sort_in()
        return sum(nbytes for nbytes, _, _ in self._free)

    def take(self, nbytes: int) -> HostBuffer:
        """At least so many bytes."""
        self._sort_in()
        place = bisect_left(self._free, (nbytes, -1))
        if place < len(self._free) and self._free[place][0] <= self._largest * nbytes:
            size, _, memory = self._free.pop(place)
        else:
            size, memory = nbytes, self._empty(nbytes)
            self._nbytes = self._nbytes + nbytes
        return HostBuffer(self, size, memory)

    def give_back(self, nbytes: int, memory: Tensor) -> None:
        """A piece that nobody needs any more. See [Note: memory and the copy stream]: a copy may still be under way in it."""
        self._returned.append((nbytes, memory))

    def clear(self) -> None:
        """Free pieces go back to the framework."""
        self._nbytes = self._nbytes - self.free_nbytes
        self._free.clear()

    def _sort_in(self) -> None:
        while self._returned:
            nbytes, memory = self._returned.popleft()
            self._number = self._number + 1
            insort(self._free, (nbytes, self._number, memory))


class HostBuffer:
    """A piece in use; it goes back to its pool when nobody holds it."""

    def __init__(self, pool: HostPool, nbytes: int, memory: Tensor) -> None:
        self._pool, self._nbytes, self.memory = pool, nbytes, memory

    def __del__(self) -> None:
        self._pool.give_back(self._nbytes, self.memory)
