"""Attention heads: whole on one rank, so their number must divide, or keys and values are computed by several ranks.

[Note: replicated keys and values] Of ``query_heads`` every rank has ``n = query_heads / ranks``, one after the other, and every
``times = query_heads / heads`` of them share one head of keys and values. Where ``heads`` do not divide over the ranks, every
rank keeps the whole projection, computes those heads that its queries need, and gives one for every ``gcd(n, times)`` of its
queries: the largest number so that all ranks' queries find theirs by the usual rule, query ``i`` to head ``i // times``, with
``times = n / (heads on the rank)``. 12 query heads and 6 on 4 ranks: rank 0 computes the heads 0 and 1, and gives 0, 0, 1.
Each rank has a summand of the parameters' gradients; they are added up.
"""

from __future__ import annotations

import math
from typing import Any


def check_heads(style: str, kind: str, heads: Any, features: int, num_ranks: int) -> None:
    """ValueError unless ``features`` are whole heads, and the heads divide over the ranks."""
    check_whole_heads(style, kind, heads, features)
    if heads % num_ranks:
        raise ValueError(
            f"{style}: {heads} heads of this {kind} do not divide over {num_ranks} ranks: use a number of ranks that divides "
            f"{heads}, or, for keys and values, say replicate_kv=True and query_heads= of the queries"
        )


def check_whole_heads(style: str, kind: str, heads: Any, features: int) -> None:
    """ValueError unless ``features`` are whole heads."""
    _check_number(style, "heads", heads)
    if features % heads:
        raise ValueError(
            f"{style}: the {features} features of this {kind} are not {heads} heads of one size: give the number of heads that "
            f"this projection has"
        )


def heads_on_rank(
    style: str, kind: str, heads: int, query_heads: Any, num_ranks: int, rank: int
) -> tuple[int, ...]:
    """Which heads of keys and values a rank gives, in order, some perhaps several times. See [Note: replicated keys and values]."""
    _check_number(style, "query_heads", query_heads)
    if query_heads % heads:
        raise ValueError(
            f"{style}: {query_heads} query heads are not shared evenly by {heads} heads of this {kind}: query_heads must be a "
            f"multiple of heads"
        )
    if query_heads % num_ranks:
        raise ValueError(
            f"{style}: {query_heads} query heads of this {kind} do not divide over {num_ranks} ranks: use a number of ranks "
            f"that divides {query_heads}"
        )
    times, own = query_heads // heads, query_heads // num_ranks
    step = math.gcd(own, times)
    return tuple((rank * own + i) // times for i in range(0, own, step))


def _check_number(style: str, name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{style}: {name} must be a number of attention heads, got {number!r}")
