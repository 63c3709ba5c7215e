"""Ports for the rendezvous of a new job on this host.

[Note: reserved ports] A port that was free a moment ago may be somebody else's when the job's first process opens it, seconds later:
two test runs on one machine meet so. So the launcher keeps sockets bound to the ports for as long as the job lives. Binding them
it asks for ports that nobody uses, so a second launcher does not get them. Then it says that others may share them: a server that
asks for that too (TCP stores do) listens beside a bound socket that does not listen itself.
"""

from __future__ import annotations

import random
import socket
from types import TracebackType

FIRST, LAST = 12000, 31998
"""Below the range from which the kernel gives ports to outgoing connections, so that none of them is in the way."""
ATTEMPTS = 200
HOST = "127.0.0.1"


class ReservedPorts:
    """Adjacent ports that no other launcher gets until they are released."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self.first: int = sockets[0].getsockname()[1]

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let anybody have them. May be called again."""
        for each in self._sockets:
            each.close()


def reserve_ports(count: int = 2) -> ReservedPorts:
    """So many adjacent ports of 127.0.0.1, see [Note: reserved ports].

    Two, because the key-value store of one framework listens beside its rendezvous port. The choice is random: jobs that
    start at the same moment ask for different ones. Where the system lets no server listen beside a bound socket, nothing is
    kept. RuntimeError if none are found.
    """
    generator = random.Random()  # its own: the caller's random numbers must not change
    for _ in range(ATTEMPTS):
        start = generator.randrange(FIRST, LAST)
        sockets: list[socket.socket] = []
        for port in range(start, start + count):
            found = _bound(port)
            if found is None:
                break
            sockets.append(found)
        reserved = ReservedPorts(sockets) if sockets else None
        if reserved is None or len(sockets) < count:
            if reserved is not None:
                reserved.release()
            continue
        if not _lets_servers_in(reserved.first):
            reserved.release()
        return reserved
    raise RuntimeError(
        f"no {count} adjacent free ports found on {HOST} between {FIRST} and {LAST} in {ATTEMPTS} attempts"
    )


def _bound(port: int) -> socket.socket | None:
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        own.bind((HOST, port))
    except OSError:
        own.close()
        return None
    share(own)
    return own


def share(bound: socket.socket) -> None:
    """Let a server listen beside a socket that is bound and does not listen."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _lets_servers_in(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        share(server)
        try:
            server.bind((HOST, port))
            server.listen()
        except OSError:
            return False
    return True
