"""What a check found: where, what, why it is refused, and what to write instead."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Violation:
    """One finding. `line` is 0 for a finding about a file or folder as a whole."""

    path: Path
    line: int
    rule: str
    what: str
    why: str
    instead: str

    def render(self, root: Path) -> str:
        """The finding as one paragraph that starts with a place an editor can jump to."""
        place = self.path.relative_to(root) if self.path.is_relative_to(root) else self.path
        line = f":{self.line}" if self.line else ""
        return f"{place}{line}: [{self.rule}] {self.what}\n    why: {self.why}\n    instead: {self.instead}"
