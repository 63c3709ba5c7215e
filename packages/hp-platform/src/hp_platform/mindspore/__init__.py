"""MindSpore: its CPU build, and Ascend and GPU through its public API (not run on hardware)."""

import os

# MindSpore reads it once, while it is imported; without it every process prints some 60 lines of warnings.
os.environ.setdefault("GLOG_v", "3")

import mindspore

from hp_platform.mindspore._platform import AcceleratorPlatform, MindSporePlatform


def build_platform() -> MindSporePlatform:
    """A new platform object; :func:`hp_platform.get_platform` keeps the one of the process."""
    return MindSporePlatform() if mindspore.get_current_device()[0] == "CPU" else AcceleratorPlatform()


__all__ = ["MindSporePlatform", "build_platform"]
