"""When a product is cut so that communication runs beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MIB = 2**20


@dataclass(frozen=True)
class OverlapPolicy:
    """From which size on products are cut, and how. Equal on all ranks, since it decides what they launch.

    What runs beside something else costs the host more, for launches and for what orders them, and a product that is cut fills
    a device less well. So below ``min_copied_nbytes`` (with copies) or ``min_nbytes`` everything is the plain program: one
    collective and one product, in order.

    ValueError for sizes below 0, less than one chunk, and another ``gather_by``.
    """

    min_copied_nbytes: int = 16 * MIB
    """Where the ranks reach each other's memory (GPUs of one machine), their copy engines move the rows of wholes of at least so many
    bytes, see :mod:`hp_tp.overlap.copies`: 2048 tokens of 4096 features of 2 bytes. On two NVIDIA H200 layers of that size take 0.69
    to 0.93 of their time, of twice and four times that size 0.64 to 0.95; shorter ones are bound by the host, for which copies are
    more calls than a collective."""
    min_product: int = 2**21
    """Beside copies a product is cut into those of this rank's rows and of the others', each with at least so many elements in its result:
    a smaller one does not fill a device. (A GPU of 132 multiprocessors that makes a tile of 128 x 128 on each. Products of 2 and 3
    million elements gain: 0.20 ms cut, 0.21 uncut, 0.25 plain; 0.09, 0.12, 0.13.)"""
    max_peer_nbytes: int = 512 * MIB
    """What is larger in peer memory, which holds the largest whole that ever travelled twice, goes by collectives. That memory hangs on
    the group: all layers and models that are parallel over it share it, and ending the group gives it back."""

    min_nbytes: int = 32 * MIB
    """Bytes of the whole gathered input, or of one rank's whole summand of a result, from which on anything runs beside anything.
    The default is a sequence of 4096 tokens with 4096 features of 2 bytes: there a device is longer busy with a layer than the host."""
    features_per_peer: int = 8192
    """Beside an all-gather that hides behind the product of the own rows, that product must be worth its launches: it is cut if it
    has so many features (``out`` of all weights together, of this rank) for every other rank. The time of the gather grows with
    the other ranks' rows, that of the product with features. On two NVIDIA H200 (4096 tokens of 4096 features) a layer took
    0.96 of its time with 14336 features per rank, 1.03 with 7168, 1.10 with 3072."""
    chunk_nbytes: int = 64 * MIB
    """A reduction is cut into chunks of at least so many bytes of the summand; below, the start of each costs more than it hides: the
    host starts a chunk in some 0.3 ms, in which a link of 200 GB/s moves as many bytes."""
    max_chunks: int = 4
    """Into how many at most."""
    gather_by: Literal["collective", "sends"] = "collective"
    """``"collective"``: one all-gather beside the product of the own rows. ``"sends"``: a transfer between two ranks per piece, each
    multiplied when it has come; for inputs whose pieces lie in one block each (of a batch of one, or cut along dim 0). See
    [Note: which pieces] in :mod:`hp_tp.overlap`."""

    def __post_init__(self) -> None:
        least = {
            "min_copied_nbytes": 0,
            "min_product": 0,
            "max_peer_nbytes": 0,
            "min_nbytes": 0,
            "features_per_peer": 0,
            "chunk_nbytes": 0,
            "max_chunks": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"OverlapPolicy: {name} is {bound} or more, got {getattr(self, name)}")
        if self.gather_by not in ("collective", "sends"):
            raise ValueError(f"gather_by is 'collective' or 'sends', got {self.gather_by!r}")

    def is_plain(self, nbytes: int) -> bool:
        """Whether a layer that communicates so much runs one after the other, whatever the ranks' devices can do."""
        return nbytes < min(self.min_nbytes, self.min_copied_nbytes)

    def copies(self, nbytes: int) -> bool:
        """Whether so much is moved by copies, where the ranks reach each other's memory."""
        return self.gather_by == "collective" and nbytes >= self.min_copied_nbytes

    def num_products(self, own: int, others: int) -> int:
        """Beside copies: into how many products that of the other ranks' rows is cut; 0: all rows are multiplied at once.

        Of elements of the result: of this rank's rows, and of the others'. Ranks may decide differently.
        """
        return 0 if own < self.min_product else max(1, others // max(1, self.min_product))

    def cuts_gather(self, features: int, num_ranks: int) -> bool:
        """Whether a product with ``features`` is cut, so that it runs beside a collective that gathers its input.

        Ranks with more or fewer features may decide otherwise: the launch is the same. Where it is not, features do not count.
        """
        return self.gather_by == "sends" or features >= self.features_per_peer * (num_ranks - 1)

    def num_chunks(self, nbytes: int) -> int:
        """Into how many chunks a reduction of so many bytes is cut; 1: it is not."""
        return max(1, min(self.max_chunks, nbytes // max(1, self.chunk_nbytes)))


def policy_of(overlap: Any, style: str) -> OverlapPolicy | None:
    """The option ``overlap`` of a style: True, False, or a policy. ValueError for anything else."""
    if isinstance(overlap, OverlapPolicy):
        return overlap
    if not isinstance(overlap, bool):
        raise ValueError(f"{style}: overlap must be True, False or an OverlapPolicy, got {overlap!r}")
    return OverlapPolicy() if overlap else None
