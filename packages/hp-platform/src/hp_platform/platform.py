"""The platform: one object per process that offers the primitives of the framework in use."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
from typing import Any, Protocol

from hp_platform import _process
from hp_platform.capabilities import CAPABILITIES, check_known
from hp_platform.protocols import (
    AutogradOps,
    CommOps,
    DeviceHandle,
    NNOps,
    RandomOps,
    ScoreOps,
    StorageOps,
    TensorOps,
    UpdateOps,
)

ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_PLATFORM"


class PlatformType(str, enum.Enum):
    """The frameworks. The value is the name of the framework's module and of the sub-package that adapts it."""

    PYTORCH = "torch"
    MINDSPORE = "mindspore"


class Platform(TensorOps, StorageOps, NNOps, ScoreOps, AutogradOps, RandomOps, CommOps, UpdateOps, Protocol):
    """All primitives of :mod:`hp_platform.protocols` on one object, and what it can say of itself."""

    platform_type: PlatformType
    framework_version: str

    def __hash__(self) -> int: ...

    def device(self, name: str | None = None) -> DeviceHandle:
        """The handle of ``"cpu"``, ``"cuda"``, ``"npu"`` (an index as in ``"cuda:1"`` is ignored); None: the best available one.

        ValueError for an unknown name, RuntimeError for a device that this machine does not have.
        """
        ...

    def device_types(self) -> tuple[str, ...]:
        """The kinds of device usable in this process, best first; ``"cpu"`` is always among them."""
        ...

    def supports(self, capability: str, device: str | None = None) -> bool:
        """Whether ``capability`` (a name of :data:`hp_platform.capabilities.CAPABILITIES`) exists here, for tensors of ``device``."""
        ...


def require(platform: Platform, capability: str, device: str | None = None, *, what: str) -> None:
    """Raise NotImplementedError, naming framework, device and way out, unless the capability exists.

    ``what`` is the caller's own feature, for the message.
    """
    check_known(capability)
    if not platform.supports(capability, device):
        on = f"{platform.platform_type.value} {platform.framework_version}" + (
            f" on {device}" if device else ""
        )
        raise NotImplementedError(
            f"{what} needs {capability!r}, which {on} does not have: {CAPABILITIES[capability]}"
        )


def get_platform() -> Platform:
    """The platform of this process; found at the first call, the same object ever after.

    ``HYPER_PARALLEL_PLATFORM`` (``torch`` or ``mindspore``) decides if it is set; else the framework that the program has
    already imported; else the only one installed. Raises RuntimeError, saying what to install or set, where that does not
    lead to exactly one framework that is there, ValueError for an unknown name in the variable. No communication.
    """
    if _process.state.platform is None:
        _process.state.platform = _load(_choose())
        while _process.state.upon_platform:
            _process.state.upon_platform.pop(0)(_process.state.platform)
    return _process.state.platform


def _choose() -> PlatformType:
    named = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
    if named:
        try:
            wanted = PlatformType(named)
        except ValueError:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}={named!r} names no platform; set it to {' or '.join(p.value for p in PlatformType)}"
            ) from None
        if named not in sys.modules and importlib.util.find_spec(named) is None:
            raise RuntimeError(
                f"{ENVIRONMENT_VARIABLE}={named}, but {named} is not installed: pip install 'hp-platform[{named}]', "
                "or unset the variable"
            )
        return wanted
    imported = [p for p in PlatformType if p.value in sys.modules]
    installed = [p for p in PlatformType if importlib.util.find_spec(p.value) is not None]
    for found in (imported, installed):
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise RuntimeError(
                f"{' and '.join(p.value for p in found)} are both {'imported' if found is imported else 'installed'}; "
                f"set {ENVIRONMENT_VARIABLE} to the one to use"
            )
    raise RuntimeError(
        "no framework is installed; install one of them, for example: pip install 'hp-platform[torch]' or 'hp-platform[mindspore]'"
    )


def _load(kind: PlatformType) -> Any:
    return importlib.import_module(f"hp_platform.{kind.value}").build_platform()
