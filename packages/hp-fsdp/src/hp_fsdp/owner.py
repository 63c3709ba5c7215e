"""Where a parameter hangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Owner:
    """A place where a parameter hangs. A tied one has several."""

    module: Any
    attribute: str
    name: str
    """Dotted, from the unit's module."""
