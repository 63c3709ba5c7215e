"""What of a parameter and its gradient lies on this rank, and where its matrices are orthogonalised."""

from __future__ import annotations

from typing import Any

from hp_optim.checks import NAMES, PARAMS
from hp_optim.groups import Group
from hp_platform.platform import Platform


def named(group: Group) -> list[tuple[Any, str]]:
    """The group's parameters with their names, empty ones where it has none. None of both if it is only options."""
    parameters = group.get(PARAMS, ())
    return list(zip(parameters, group.get(NAMES, [""] * len(parameters)), strict=True))


def rate_on(platform: Platform, lr: Any, device: str) -> Any:
    """A learning rate where the parameters lie."""
    return platform.to_device(lr, device) if platform.is_tensor(lr) else lr


def device_of_iteration(platform: Platform, spec: Any, storage: str) -> str:
    """Where the matrices of a parameter are orthogonalised: on the kind of device that its mesh says."""
    kind = storage.partition(":")[0] if spec is None else spec.mesh.device_type
    return storage if kind == storage.partition(":")[0] else platform.device(kind).current()
