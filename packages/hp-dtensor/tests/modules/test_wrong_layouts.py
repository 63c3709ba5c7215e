"""A user's mistakes in laying out modules and functions, each with its message: given, expected, what to change."""

import sys
from pathlib import Path

import pytest

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from refused_layouts import PLANS
from refused_styles import STYLES_AND_FUNCTIONS

CALLS = {**PLANS, **STYLES_AND_FUNCTIONS}


@pytest.mark.parametrize("case", CALLS)
@distributed(world_size=2)
def test_wrong_call_is_refused(case: str, world: World) -> None:
    call, kind, text = CALLS[case]
    with pytest.raises(kind, match=text):
        call(world)
