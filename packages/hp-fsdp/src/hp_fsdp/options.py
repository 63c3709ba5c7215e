"""How a unit is to behave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hp_fsdp.policy import Precision
from hp_fsdp.reduce import Wishes


@dataclass
class Options:
    """What ``fully_shard`` was told of a unit, and what was changed since."""

    precision: Precision
    reshard_after_forward: bool | int = True
    reshard_as_told: bool | None = None
    """What set_reshard_after_forward said; it also counts for the root."""
    reshard_after_backward: bool = True
    comm_fusion: bool | None = None
    zero_copy: bool | None = None
    offload: bool = False
    pin_memory: bool = True
    sync_gradients: bool = True
    has_put_off_sync: bool = False
    """Whether that was False at any time since the last reduction: what the user has told all ranks alike, whichever of them had
    gradients then."""
    wishes: Wishes = field(default_factory=Wishes)
    forward_prefetch: list[Any] | None = None
    """Units to gather when this one's forward begins; None: by the order of the pass before."""
    backward_prefetch: list[Any] | None = None

    @property
    def is_fused(self) -> bool:
        """Whether parameters travel together, as far as that is possible."""
        return self.comm_fusion is not False
