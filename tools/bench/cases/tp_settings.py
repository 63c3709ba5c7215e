"""What runs in the rows of `tp`, and what each is to reach. Needs no framework."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from bench.models.sizes import SIZES, Sizes

LENGTHS = (512, 2048, 4096)
# Times as fast as the peer: eager and short, where the host bounds a step; and everywhere else.
SHORT, OF_PEER_IF_SHORT, OF_PEER = 2048, 1.2, 1.0
LAYERS = 4


class Part(enum.Enum):
    """Of a decoder of 8 B: what a row runs."""

    LAYER = "layer"
    MODEL = "model"
    """Embedding, four layers, head and cross-entropy."""
    LOSS = "loss"
    """Head and cross-entropy alone."""


class Side(enum.Enum):
    """Whose forward and backward it is."""

    OURS = "ours"
    PEER = "torch"
    LIMIT = "limit"
    """Cut by hand, without a library; of the loss: ours with the logits held."""


@dataclass(frozen=True)
class Family:
    """Rows that run the same thing on several lengths: it is built once for all of them."""

    part: Part
    sizes: Sizes
    sequence_parallel: bool = False
    compiled: bool = False
    overlap: bool = False
    """Ours gathers and reduces beside its products."""

    @property
    def name(self) -> str:
        """Without the length."""
        marks = ("-sp" if self.sequence_parallel else "") + ("-compiled" if self.compiled else "")
        marks = marks + ("-overlap" if self.overlap else "")
        return ("tiny-" if self.sizes is SIZES_TINY else "") + self.part.value + marks


@dataclass(frozen=True)
class Setting:
    """One row."""

    family: Family
    length: int

    @property
    def name(self) -> str:
        """Of the row."""
        return f"{self.family.name}-{self.length}"

    @property
    def goal_of_peer(self) -> float | None:
        """How many times as fast as the peer; None: the row is about memory."""
        if self.family.part is Part.LOSS:
            return None
        return OF_PEER_IF_SHORT if self.length <= SHORT and not self.family.compiled else OF_PEER


SIZES_8B = replace(SIZES["8b"], layers=LAYERS)
# Divisible by all numbers of ranks up to 4 but 3, as the large one.
SIZES_TINY = replace(SIZES["tiny"], heads=4, groups=4, layers=2)
FAMILIES = (
    *(
        Family(part, SIZES_8B, sequence_parallel, compiled)
        for part in (Part.LAYER, Part.MODEL)
        for compiled in (False, True)
        for sequence_parallel in (True, False)
    ),
    Family(Part.LAYER, SIZES_8B, sequence_parallel=True, overlap=True),
    Family(Part.LOSS, SIZES_8B),
)
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (Setting(family, length) for family in FAMILIES for length in LENGTHS)
}


def on_host(setting: Setting) -> Setting:
    """The same with tiny sizes and shorter lengths: 16, 64 and 128."""
    return Setting(replace(setting.family, sizes=SIZES_TINY), max(setting.length // 32, 16))
