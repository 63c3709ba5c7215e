"""Layers that are told to follow each other.

Without it the order is the one in which layers run. A chain says it beforehand: its last layer never leaves the device, also if other
swapped layers run after it, and while backward is at a layer, the one before it in the chain is fetched.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from hp_platform.platform import Platform

MARK = "_hp_swap_link"
"""Attribute of a layer of a chain."""


@dataclass(eq=False)
class Link:
    """A layer's place."""

    name: str
    before: Link | None = None
    after: Link | None = None

    def leads_to(self, other: Link) -> bool:
        """Whether ``other`` comes later, or is this."""
        link: Link | None = self
        while link is not None:
            if link is other:
                return True
            link = link.after
        return False


def link_of(layer: Any) -> Link | None:
    """None for a layer of no chain."""
    found: Link | None = getattr(layer, MARK, None)
    return found


def join(platform: Platform, first: Any, second: Any, new_name: Any) -> bool:
    """``second`` follows ``first``; ``new_name()`` names a layer that is in no chain yet. False where there is nothing to do."""
    for layer in (first, second):
        if not platform.is_module(layer):
            raise ValueError(
                f"set_forward_prefetch_layer takes two modules, got {type(layer).__name__}: the layers of a model, in the order in which "
                "forward runs them"
            )
    if first is second:
        warnings.warn(
            f"set_forward_prefetch_layer was given the same {type(first).__name__} twice, which cannot follow itself: nothing was set",
            stacklevel=3,
        )
        return False
    one, other = link_of(first), link_of(second)
    if one is not None and other is not None and one.after is other:
        return False
    if one is not None and one.after is not None:
        raise ValueError(
            f"{one.name} is followed by {one.after.name} already: a layer has one that follows it"
        )
    if other is not None and other.before is not None:
        raise ValueError(f"{other.name} follows {other.before.name} already: a layer follows one other")
    if one is not None and other is not None and other.leads_to(one):
        raise ValueError(f"{one.name} comes after {other.name} already: a chain has an end")
    one, other = one or Link(new_name()), other or Link(new_name())
    one.after, other.before = other, one
    setattr(first, MARK, one)
    setattr(second, MARK, other)
    return True
