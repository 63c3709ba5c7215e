"""Wrong calls and wrong policies of overlap say what to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor.transport import Cut
from hp_platform.testing import World, distributed
from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter

sys.path.insert(0, str(Path(__file__).parent))
from overlap_block import Numbers, cut_of, leaves, part

# -------------------------------------------------------------------------------------------------------- wrong calls
WRONG = {
    "no weight": (
        lambda t, cut: all_gather_matmul(t["x"], [], cut),
        r"all_gather_matmul needs a weight; to gather alone, redistribute the input",
    ),
    "a bias too many": (
        lambda t, cut: all_gather_matmul(t["x"], [t["first"]], cut, biases=[t["bias"], None]),
        r"all_gather_matmul got 1 weights and 2 biases: one each, or None",
    ),
    "features are cut": (
        lambda t, cut: all_gather_matmul(
            t["x"], [t["first"]], Cut(cut.group, cut.positions, cut.index, 1, cut.sizes)
        ),
        r"all_gather_matmul: the cut dim is one of those before the last, from 0; got dim 1 of an input of shape \(6, 5\)",
    ),
    "a whole for a piece": (
        lambda t, cut: all_gather_matmul(t["loss"], [t["last"]], cut),
        r"all_gather_matmul: dim 0 of the input is 6 here by the cut \(6, 6\), got shape \(12, 4\)",
    ),
    "a piece for a whole": (
        lambda t, cut: matmul_reduce_scatter(t["x"], t["first"], cut),
        r"matmul_reduce_scatter: dim 0 of the input is 12 here by the cut \(6, 6\), got shape \(6, 5\)",
    ),
    "a weight of other inputs": (
        lambda t, cut: all_gather_matmul(t["x"], [t["first"], t["last"]], cut),
        r"all_gather_matmul: weight 1 must be \(out, 5\) of float\d\d for an input of shape \(6, 5\), got \(4, 6\) of",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@distributed(world_size=2)
def test_a_wrong_call_says_what_to_change(world: World, name: str) -> None:
    numbers, cut = Numbers.of(world, (12,), 6).values, cut_of(world, 12, 0)
    t = leaves(world, {**numbers, "x": part(numbers["x"], 0, cut.index, 2)})
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(t, cut)


def test_a_wrong_policy_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="OverlapPolicy: max_chunks is 1 or more, got 0"):
        OverlapPolicy(max_chunks=0)
    with pytest.raises(ValueError, match="OverlapPolicy: min_nbytes is 0 or more, got -1"):
        OverlapPolicy(min_nbytes=-1)
    with pytest.raises(ValueError, match=r"gather_by is 'collective' or 'sends', got 'ring'"):
        OverlapPolicy(gather_by="ring")  # type: ignore[arg-type]
