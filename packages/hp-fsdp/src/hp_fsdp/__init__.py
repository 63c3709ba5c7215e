"""Fully sharded data parallel training."""

from hp_fsdp.__about__ import __version__

__all__ = ["__version__"]
