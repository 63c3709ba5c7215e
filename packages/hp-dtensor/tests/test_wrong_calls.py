"""A user's mistakes, each with its message: what was given, what was expected, what to change."""

import sys
from pathlib import Path

import pytest

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from refused_operations import OPERATIONS
from refused_tensors import TENSORS

CALLS = {**TENSORS, **OPERATIONS}


@pytest.mark.once
def test_there_are_more_than_forty_wrong_calls() -> None:
    assert len(CALLS) >= 40


@pytest.mark.parametrize("case", CALLS)
@distributed(world_size=2)
def test_wrong_call_is_refused(case: str, world: World) -> None:
    call, kind, text = CALLS[case]
    with pytest.raises(kind, match=text):
        call(world)
