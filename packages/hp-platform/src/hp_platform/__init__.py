"""What hyper-parallel needs of a framework."""

from hp_platform.__about__ import __version__

__all__ = ["__version__"]
