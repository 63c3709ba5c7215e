"""A port for the rendezvous of a new job on this host."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 12000, 31998
"""Below the range from which the kernel gives ports to outgoing connections, so that none of them takes ours meanwhile."""
ATTEMPTS = 200


def free_adjacent_ports() -> int:
    """A port ``p`` such that ``p`` and ``p + 1`` are free on 127.0.0.1 now.

    Two, because the key-value store of one framework listens beside its rendezvous port. The choice is random: jobs that
    start at the same moment ask for different ones. RuntimeError if none is found.
    """
    generator = random.Random()  # its own: the caller's random numbers must not change
    for _ in range(ATTEMPTS):
        port = generator.randrange(FIRST, LAST, 2)
        if _is_free(port) and _is_free(port + 1):
            return port
    raise RuntimeError(
        f"no two adjacent free ports found on 127.0.0.1 between {FIRST} and {LAST} in {ATTEMPTS} attempts"
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As a server would: a port whose last connection is still winding down counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
