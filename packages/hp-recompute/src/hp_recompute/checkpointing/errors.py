"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """The second run of a checkpointed function did something else than the first."""
