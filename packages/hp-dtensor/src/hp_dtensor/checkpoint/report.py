"""What a load found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """How a state and a checkpoint fit together; names are paths, parts joined by ``/``."""

    folder: str
    """What was read."""
    missing: tuple[str, ...] = ()
    """In the state, not in the checkpoint: left as they were."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not in the state: not read."""
    mismatched: tuple[str, ...] = ()
    """In both, but different in kind, shape or dtype: left as they were. Each with what was found and expected."""
    incomplete: tuple[str, ...] = ()
    """Folders beside it whose save was never finished, or is under way. Nothing to worry about, and never read."""

    @property
    def is_exact(self) -> bool:
        """Whether everything of the checkpoint went into the state, and everything of the state came from it."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [
            f"{len(names)} {what}: {', '.join(names)}"
            for what in ("missing", "unexpected", "mismatched", "incomplete")
            if (names := getattr(self, what))
        ]
        return f"{self.folder}: {'; '.join(parts) or 'exact'}"
