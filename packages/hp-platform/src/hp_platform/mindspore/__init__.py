"""MindSpore: its CPU build, and Ascend and GPU through its public API (not run on hardware)."""

import os

# MindSpore reads it once, while it is imported; without it every process prints some 60 lines of warnings.
os.environ.setdefault("GLOG_v", "3")

import mindspore

from hp_platform.mindspore._platform import AcceleratorPlatform, MindSporePlatform
from hp_platform.mindspore.blocking import launch_blocking


def build_platform() -> MindSporePlatform:
    """A new platform object; :func:`hp_platform.get_platform` keeps the one of the process.

    [Note: operations on CPU are launched blocking] By itself MindSpore hands every operation through a pipeline of threads, which
    wait for each other by spinning. On a device that frees the host; on CPU they only take the cores from the kernels: a training
    step of a small model took 660 ms so, and 38 ms launched blocking (2 cores). Errors come where they happen, too.
    """
    if mindspore.get_current_device()[0] != "CPU":
        return AcceleratorPlatform()
    launch_blocking()
    return MindSporePlatform()


__all__ = ["MindSporePlatform", "build_platform"]
