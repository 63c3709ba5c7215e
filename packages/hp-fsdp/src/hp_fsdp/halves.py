"""How large the halves of a model's peer memory are: see [Note: two halves] in :mod:`hp_platform.halves`.

[Note: small halves] Peer memory stays while the model does, so it is small; what is larger goes through it in several turns.
"""

from __future__ import annotations

from typing import Literal

from hp_platform.halves import ALIGNMENT

HALF_NBYTES = 31 * 1024 * 1024
"""Of a half, at most."""
Use = Literal["gather", "exchange"]


def half_numel(use: Use, largest: int, num_ranks: int, itemsize: int) -> int:
    """Elements of a half, if the longest row has ``largest``: for an exchange with a row for every rank."""
    rows = num_ranks if use == "exchange" else 1
    longest = -(-largest // ALIGNMENT) * ALIGNMENT
    most = HALF_NBYTES // itemsize // rows // ALIGNMENT * ALIGNMENT
    return rows * max(ALIGNMENT, min(longest, most))
