"""A model and its optimizer that go on from a checkpoint of others, perhaps of another mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hp_dtensor
from hp_dtensor import DTensor
from hp_fsdp import like_parameters, set_optimizer_state_dict
from hp_platform import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))
from optim_twins import Shadow


def gone_on_from(
    before: Shadow, saved: dict[str, Any], place: Path, mesh: DeviceMesh, options: dict[str, Any]
) -> Shadow:
    """Another model, with these options, that has read the parameters of ``before`` and its state ``saved`` from files in ``place``."""
    platform = before.platform
    model = {name: p.detach() for name, p in before.parameters.items()}
    hp_dtensor.save({"model": model, "optimizer": saved}, place)
    after = Shadow(before.world, mesh, options=options)
    found = hp_dtensor.load(place, like=like_parameters(after.model))
    for name, parameter in after.parameters.items():
        value = found["model"][name]
        local = value.to_local() if isinstance(value, DTensor) else value
        platform.copy_(parameter.to_local(), platform.detach(local))
    set_optimizer_state_dict(after.model, after.optimizer, found["optimizer"])
    # The plain tensors go on from what they were.
    after.wholes, after.shadow = before.wholes, before.shadow
    return after
