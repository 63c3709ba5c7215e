"""The top level of the repository holds what the design names, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

from lint.violation import Violation

ALLOWED = frozenset(
    {
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "docs",
        "integration_tests",
        "noxfile.py",
        "packages",
        "pyproject.toml",
        "tools",
    }
)
# Written by commands, ignored by git.
GENERATED = frozenset({"__pycache__", "out"})


def check(root: Path) -> Iterator[Violation]:
    """Entries that are missing, and entries that do not belong there; dotfiles are free."""
    present = {entry.name for entry in root.iterdir() if not entry.name.startswith(".")} - GENERATED
    why = "a reader finds their way by folder names, so the top level stays short and known"
    for name in sorted(present - ALLOWED):
        instead = (
            "move it to the folder it belongs to, or add it to lint/top_level.py with the design's consent"
        )
        yield Violation(root / name, 0, "top-level", "is not an entry of the top level", why, instead)
    for name in sorted(ALLOWED - present):
        yield Violation(root / name, 0, "top-level", "is missing from the top level", why, "restore it")
