"""What is trained in the rows of `fsdp`, and what each is to reach."""

from __future__ import annotations

from dataclasses import dataclass

from bench.models.sizes import SIZES, Sizes

# Speed, as a part of the limit, in every row; and as a multiple of the peer's, in rows that the host or communication bounds.
OF_LIMIT = 0.92
OF_PEER, OF_PEER_AT_BATCH_1 = 1.0, 1.1


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained."""

    model: str
    """Its name in the table."""
    sizes: Sizes
    batch: int
    """Sequences per GPU."""
    recompute: bool = False
    """Activations of blocks are computed again in backward."""
    replicas: int = 1
    """Of the sharded model, each on its part of the GPUs (HSDP)."""
    own_adamw: bool = False
    """Our side has hp-optim's AdamW; the others always have torch's."""

    @property
    def name(self) -> str:
        """Of the row."""
        marks = ("-recompute" if self.recompute else "") + ("-hsdp" if self.replicas > 1 else "")
        marks = marks + ("-own-adamw" if self.own_adamw else "")
        return f"{self.model}-batch{self.batch}{marks}"

    @property
    def goal_of_peer(self) -> float:
        """How many times as fast as the peer."""
        return OF_PEER_AT_BATCH_1 if self.batch == 1 else OF_PEER

    @property
    def tokens(self) -> int:
        """Per step and GPU."""
        return self.batch * self.sizes.length

    def fits(self, num_ranks: int) -> bool:
        """Whether the ranks can be divided so: replicas are sharded over at least two."""
        return self.replicas == 1 or (num_ranks % self.replicas == 0 and num_ranks > self.replicas)


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for replicas in (1, 2)
    for setting in (
        *(Setting("1b", SIZES["1b"], batch, replicas=replicas) for batch in (1, 2, 4)),
        *(Setting("8b", SIZES["8b"], batch, recompute=True, replicas=replicas) for batch in (1, 2)),
    )
}
