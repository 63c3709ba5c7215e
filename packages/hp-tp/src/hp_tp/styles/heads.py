"""What must divide: attention heads are whole on one rank."""

from __future__ import annotations

from typing import Any


def check_heads(style: str, kind: str, heads: Any, features: int, num_ranks: int) -> None:
    """ValueError unless ``features`` are whole heads, and the heads divide over the ranks."""
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{style}: heads must be a number of attention heads, got {heads!r}")
    if features % heads:
        raise ValueError(
            f"{style}: the {features} features of this {kind} are not {heads} heads of one size: give the heads that this "
            f"projection has"
        )
    if heads % num_ranks:
        raise ValueError(
            f"{style}: {heads} heads of this {kind} do not divide over {num_ranks} ranks: use a number of ranks that divides "
            f"{heads}, or, for keys and values, replicate_kv=True with query_heads="
        )
