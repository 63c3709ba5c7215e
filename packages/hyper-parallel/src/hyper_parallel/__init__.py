"""Distributed training in parts, and the reference trainer."""

from hyper_parallel.__about__ import __version__

__all__ = ["__version__"]
