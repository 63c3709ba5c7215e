"""The key-value store that all ranks share: MindSpore's TCPStore, made to answer without waiting."""

from __future__ import annotations

import time
from typing import Any


class Store:
    """Keys of one incarnation of the world, apart from those of the next; and this rank's own count of what it did with them."""

    def __init__(self, tcp: Any, prefix: str, seconds: float) -> None:
        self._tcp = tcp
        self._prefix = prefix
        self.seconds = seconds
        """How long to wait for a peer."""
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Publish."""
        self._tcp.set(self._prefix + key, value)
        # Reading a missing key blocks, counting does not: so a counter tells that the value is there.
        self._tcp.add(f"{self._prefix}{key}#there", 1)

    def has(self, key: str) -> bool:
        """Whether somebody has published."""
        return self.count(f"{key}#there", 0) > 0

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        if not self.has(key):
            return None
        value = self._tcp.get(self._prefix + key)
        return value if isinstance(value, bytes) else str(value).encode()

    def forget(self, key: str) -> None:
        """Drop what was published under a key that is not used again."""
        self._tcp.delete_key(self._prefix + key)
        self._tcp.delete_key(f"{self._prefix}{key}#there")

    def count(self, key: str, amount: int) -> int:
        """Add to a counter that all ranks share; its new value."""
        return int(self._tcp.add(self._prefix + key, amount))

    def number(self, key: str) -> int:
        """The next number of this rank's own, from 1, under ``key``; no communication."""
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return self._numbers[key]

    def meet(self, key: str, expected: int, seconds: float) -> bool:
        """Count this rank and wait until ``expected`` are counted, at most so long; whether they are."""
        deadline = time.monotonic() + seconds
        present = self.count(key, 1)
        while present < expected and time.monotonic() < deadline:
            time.sleep(0.002)
            present = self.count(key, 0)
        return present >= expected
