"""Which combinations of placements a run tries.

[Note: every three meet] A case of three tensors or fewer is tried in every combination. With four tensors and more a product
has up to tens of millions of members; there every three tensors meet in every combination of their placements (an orthogonal
array of strength 3). A rule decides from the placements of its arguments along one mesh dim after the other: what is cut in
one argument must be cut, or summed, in those that share the dim with it. Such a decision looks at one or two other arguments
at a time, so a fault of it shows as soon as three arguments lie in the fatal way, wherever the others lie.
"""

import itertools
import math
import random
from collections.abc import Sequence

STRENGTH = 3
"""So many tensors meet in every combination."""


class Covering:
    """Numbered combinations of one option of each of several lists; ``covering[n]`` has an option's index for each list."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        product = math.prod(self.lengths)
        self.prime = _prime_from(max([len(self.lengths), *self.lengths]))
        self.is_product = len(self.lengths) <= STRENGTH or product <= self.prime**STRENGTH
        self._count = product if self.is_product else self.prime**STRENGTH

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, ...]:
        if self.is_product:
            return _of_product(self.lengths, number)
        # The values of a polynomial of degree 2 over a prime field at as many places as there are lists: three values at
        # three places fix it, so over all polynomials any three places take all values, each once.
        number, c = divmod(number, self.prime)
        a, b = divmod(number, self.prime)
        values = [(a * x * x + b * x + c) % self.prime for x in range(len(self.lengths))]
        return tuple(value % length for value, length in zip(values, self.lengths, strict=True))


def sample(lengths: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """All combinations of their product, or so many of them, the same in every run."""
    count = math.prod(lengths)
    drawn: Sequence[int] = range(count)
    if count > most:
        drawn = random.Random(count).sample(drawn, most)
    return [_of_product(lengths, number) for number in drawn]


def _of_product(lengths: Sequence[int], number: int) -> tuple[int, ...]:
    found = []
    for length in lengths:
        number, index = divmod(number, length)
        found.append(index)
    return tuple(found)


def _prime_from(n: int) -> int:
    candidates = itertools.count(max(n, 2))
    return next(p for p in candidates if all(p % d for d in range(2, math.isqrt(p) + 1)))
