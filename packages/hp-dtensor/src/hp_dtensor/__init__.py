"""Sharded tensors."""

from hp_dtensor.__about__ import __version__

__all__ = ["__version__"]
