"""What is optimized in the rows of `optim`, and what Muon is to reach."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bench.models.sizes import SIZES, Sizes

# A step of Muon, as a multiple of the time that Newton-Schulz of its matrices takes by torch's products, divided by ranks.
OF_LIMIT = 1.1
# Both sides make the same iterations, with the one triple that torch.optim.Muon has.
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
RATE, MOMENTUM, DECAY = 1e-3, 0.95, 0.1


class Side(enum.Enum):
    """Whose step it is."""

    OURS = "Muon"
    LIMIT = "Newton-Schulz / ranks"
    """By torch's products."""
    ITERATIONS = "our Newton-Schulz / ranks"
    PEER = "torch.optim.Muon"
    ADAMW = "fused AdamW"


@dataclass(frozen=True)
class Setting:
    """A model whose matrices are optimized, and how it is sharded."""

    model: str
    """Its name in the table."""
    sizes: Sizes
    replicas: int = 1
    """Of the sharded model, each on its part of the GPUs (HSDP)."""

    @property
    def name(self) -> str:
        """Of the row."""
        return self.model + ("-hsdp" if self.replicas > 1 else "")

    def fits(self, num_ranks: int) -> bool:
        """Whether the ranks can be divided so: replicas are sharded over at least two."""
        return self.replicas == 1 or (num_ranks % self.replicas == 0 and num_ranks > self.replicas)


SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (Setting("1b", SIZES["1b"]), Setting("1b", SIZES["1b"], replicas=2))
}
