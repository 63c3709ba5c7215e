"""THE chunk rule: which part of ``n`` things each of ``num_chunks`` ranks holds. Everything that cuts a dim uses it.

It is torch.chunk's: chunks of ``ceil(n / num_chunks)``, the last ones short or empty. 10 over 4 is 3, 3, 3, 1; 5 over 4 is
2, 2, 1, 0; 2 over 4 is 1, 1, 0, 0.
"""

from __future__ import annotations


def chunk_length(n: int, num_chunks: int) -> int:
    """Length of the longest chunk, ``ceil(n / num_chunks)``: what padded buffers reserve per rank."""
    if n < 0 or num_chunks < 1:
        raise ValueError(
            f"cannot cut {n} things into {num_chunks} chunks: n >= 0 and num_chunks >= 1 are needed"
        )
    return -(-n // num_chunks)


def chunk_offset(n: int, num_chunks: int, index: int) -> int:
    """Where chunk ``index`` begins, in things; an empty chunk begins at ``n``."""
    length = chunk_length(n, num_chunks)
    if not 0 <= index < num_chunks:
        raise ValueError(
            f"there is no chunk {index} among {num_chunks}: the index runs from 0 to {num_chunks - 1}"
        )
    return min(length * index, n)


def chunk_size(n: int, num_chunks: int, index: int) -> int:
    """How many things chunk ``index`` holds; 0 if it is empty."""
    return min(chunk_length(n, num_chunks), n - chunk_offset(n, num_chunks, index))


def chunk_sizes(n: int, num_chunks: int) -> tuple[int, ...]:
    """All sizes in order; their sum is ``n``."""
    return tuple(chunk_size(n, num_chunks, index) for index in range(num_chunks))
