"""Activation checkpointing and swap.

There is no code in this package yet: it holds its name and version until the release that brings it.
"""

from hp_recompute.__about__ import __version__

__all__ = ["__version__"]
