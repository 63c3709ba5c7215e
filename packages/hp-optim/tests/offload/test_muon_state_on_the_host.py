"""A step of Muon that fails while its momentum travels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_optim import Muon
from hp_optim.muon.step import Step
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from offload_twins import Twins, late_of, ways


@distributed(world_size=1)
def test_a_step_that_fails_leaves_no_copy_that_the_computation_does_not_wait_for(world: World) -> None:
    own, calls = Step.packed, list[int]()

    def fails(self: Step, batch: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyError("on purpose")
        return own(self, batch)

    late = 0
    for kind in ways(world, Muon):
        # A batch for each matrix.
        options = {"lr": 0.1, "memory_cap": 1}
        twins = Twins(
            world, [(4, 6), (6, 4), (8, 8)], (kind, Muon), offloaded={"offload_state": True}, **options
        )
        twins.step()
        transfers = late_of(twins.a)
        if transfers is None:
            continue
        late = late + 1
        twins.gradients()
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Step, "packed", fails)
            with pytest.raises(KeyError, match="on purpose"):
                twins.a.step()
        assert transfers.num_waiting == 0
        twins.a.step()  # and the next one begins with what has landed
        assert transfers.num_waiting == 0
    assert (late > 0) == world.platform.supports("write_into_view", world.device)
