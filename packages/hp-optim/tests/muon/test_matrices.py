"""Of which matrices a parameter is made: by shape, by rule, back again, and what is refused."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_optim import Muon
from hp_optim.muon.matrices import (
    Matrix,
    is_by_pattern,
    joined,
    matrices_of,
    rule_for,
    unmatched_patterns,
    views,
)
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
import muon_oracle

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any] | None, int, tuple[int, int]]] = {
    # shape, rule, number of matrices, shape of the last one
    "a weight": ((5, 7), None, 1, (5, 7)),
    "a row": ((1, 7), None, 1, (1, 7)),
    "a single number in two dims": ((1, 1), None, 1, (1, 1)),
    "experts": ((3, 5, 7), None, 3, (5, 7)),
    "one expert": ((1, 5, 7), None, 1, (5, 7)),
    "a unit middle dim": ((5, 1, 7), None, 1, (5, 7)),
    "experts of one row": ((5, 1, 7), {"layout": "batch"}, 5, (1, 7)),
    "a two-dimensional convolution": ((4, 3, 2, 5), None, 1, (4, 30)),
    "a depthwise one": ((4, 1, 3, 3), None, 1, (4, 9)),
    "a three-dimensional one": ((4, 3, 2, 2, 2), None, 1, (4, 24)),
    "a one-dimensional one": ((4, 3, 2), {"layout": "convolution"}, 1, (4, 6)),
    "queries, keys and values": ((10, 7), {"rows": [6, 2, 2]}, 3, (2, 7)),
    "heads": ((12, 7), {"rows": 6}, 6, (2, 7)),
    "heads of an output": ((7, 12), {"cols": 4}, 4, (7, 3)),
    "gate and up of experts": ((3, 10, 7), {"rows": 2}, 6, (5, 7)),
    "uneven columns of experts": ((2, 5, 7), {"cols": (1, 4, 2)}, 6, (5, 2)),
    "rows and columns": ((6, 8), {"rows": [1, 5], "cols": 4}, 8, (5, 2)),
    "input channels": ((4, 6, 3), {"layout": "convolution", "cols": [2, 4]}, 2, (4, 12)),
    "output channels": ((4, 6, 3, 3), {"rows": 2}, 2, (2, 54)),
    "experts of layers": ((2, 3, 4, 5), {"layout": "batch"}, 6, (4, 5)),
    "six dims": ((2, 1, 3, 1, 4, 5), {"layout": "batch"}, 6, (4, 5)),
    "no rows": ((0, 5), None, 0, (0, 0)),
    "no columns": ((5, 0), {"rows": 5}, 0, (0, 0)),
    "no experts": ((0, 4, 5), None, 0, (0, 0)),
}


@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_is_made_of_matrices(name: str) -> None:
    shape, rule, count, last = CASES[name]
    found = matrices_of(shape, rule)
    assert len(found) == count
    assert not found or (found[-1].rows, found[-1].cols) == last
    assert_tiles(shape, found)


def assert_tiles(shape: tuple[int, ...], found: tuple[Matrix, ...]) -> None:
    """Every element lies in just one matrix, and each is as large as its rows and columns say."""
    counts = np.zeros(shape, int)
    for matrix in found:
        index = tuple(slice(o, o + n) for o, n in zip(matrix.offset, matrix.size, strict=True))
        counts[index] += 1
        assert counts[index].shape == matrix.size
        assert matrix.rows * matrix.cols == math.prod(matrix.size) > 0
    assert (counts == 1).all()


@st.composite
def parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape and a rule that fits it."""
    sizes = st.sampled_from([0, 1, 2, 3, 4, 6, 7])
    shape = tuple(draw(st.lists(sizes, min_size=2, max_size=5)))
    rule: dict[str, Any] = {}
    if draw(st.booleans()):
        rule["layout"] = draw(st.sampled_from(["batch", "convolution"]))
    is_batch = len(shape) == 2 or (len(shape) == 3 and shape[1] != 1)
    is_batch = rule.get("layout", "batch" if is_batch else "convolution") == "batch" or len(shape) == 2
    squeezed = "layout" not in rule and len(shape) == 3 and shape[1] == 1
    dims = {"rows": -2, "cols": -1} if is_batch else {"rows": 0, "cols": 2 if squeezed else 1}
    for key, dim in dims.items():
        size = shape[dim]
        if size == 0 or draw(st.booleans()):
            continue
        if draw(st.booleans()):
            rule[key] = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        else:
            cuts = sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {size})
            rule[key] = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    return shape, rule


@pytest.mark.once
@settings(max_examples=100, deadline=None)
@given(parameters())
def test_matrices_hold_every_element_once(case: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    shape, rule = case
    assert_tiles(shape, matrices_of(shape, rule))


@distributed(world_size=1)
def test_matrices_are_views_and_make_up_the_parameter_again(world: World) -> None:
    platform = world.platform
    for name, (shape, rule, count, _) in CASES.items():
        array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        whole = platform.tensor(array, "float32", world.device)
        found = matrices_of(shape, rule)
        parts = views(platform, whole, found)
        assert len(parts) == count
        starts = {platform.data_ptr(part) - platform.data_ptr(whole) for part in parts}
        offsets = {4 * int(array[matrix.offset]) for matrix in found}
        assert starts == offsets, name
        for part, matrix in zip(parts, found, strict=True):
            index = tuple(slice(o, o + n) for o, n in zip(matrix.offset, matrix.size, strict=True))
            expected = array[index].reshape(matrix.rows, matrix.cols)
            np.testing.assert_array_equal(platform.to_numpy(part), expected, err_msg=name)
        back = joined(platform, [part * 2 for part in parts], shape, found, whole)
        assert platform.dtype_name(back.dtype) == "float32"
        np.testing.assert_array_equal(platform.to_numpy(back), 2 * array, err_msg=name)


@pytest.mark.once
def test_the_oracle_cuts_alike() -> None:
    cuts = {
        "queries, keys and values": muon_oracle.rows(6, 2, 2),
        "uneven columns of experts": muon_oracle.cols(1, 4, 2),
    }
    cuts |= {
        "gate and up of experts": muon_oracle.rows(5, 5),
        "heads of an output": muon_oracle.cols(3, 3, 3, 3),
    }
    plain = [name for name, (_, rule, count, _) in CASES.items() if rule is None and count]
    for name in (*plain, *cuts):
        shape, rule, *_ = CASES[name]
        array = np.arange(math.prod(shape)).reshape(shape)
        oracle = muon_oracle.Muon({"p": array}, cut={"p": cuts[name]} if name in cuts else None)
        theirs = [matrix for _, matrix in oracle.matrices("p", array)]
        ours = [
            array[tuple(slice(o, o + n) for o, n in zip(m.offset, m.size, strict=True))].reshape(
                m.rows, m.cols
            )
            for m in matrices_of(shape, rule)
        ]
        assert len(ours) == len(theirs), name
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)), name


@pytest.mark.once
def test_a_split_is_a_rule_for_all_or_by_pattern_or_a_function() -> None:
    rule, other = {"rows": 2}, {"cols": [1, 2]}
    assert rule_for("any", (4, 3), None) is None
    assert rule_for("any", (4, 3), rule) is rule
    assert rule_for("", (4, 3), rule) is rule
    by_pattern = {"*.gate_up": rule, "layers.0.*": other, "*.plain": None}
    assert rule_for("layers.0.gate_up", (4, 3), by_pattern) is rule
    assert rule_for("layers.0.wo", (4, 3), by_pattern) is other
    assert rule_for("layers.1.wo", (4, 3), by_pattern) is None
    assert rule_for("layers.1.plain", (4, 3), by_pattern) is None
    assert rule_for("Layers.0.wo", (4, 3), by_pattern) is None
    asked = []
    assert rule_for("w", (4, 3), lambda name, shape: asked.append((name, shape)) or rule) is rule
    assert asked == [("w", (4, 3))]
    assert [is_by_pattern(each) for each in (None, {}, rule, by_pattern, len)] == [
        False,
        False,
        False,
        True,
        False,
    ]


@pytest.mark.once
def test_patterns_that_no_name_meets_are_told() -> None:
    split = {"*.wqkv": {"rows": 3}, "*.wq": {"rows": 1}, "layers.*": None}
    assert unmatched_patterns(["layers.0.wqkv", "head"], split) == ["*.wq"]
    assert unmatched_patterns([], split) == list(split)
    assert unmatched_patterns([], {"rows": 2}) == unmatched_patterns([], None) == []


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        (
            (5,),
            None,
            "parameter 'p' of shape (5,) is a vector; Muon makes matrices orthogonal and takes parameters of 2 dims",
        ),
        ((), None, "parameter 'p' of shape () is a number"),
        (
            (2,) * 6,
            None,
            "has 6 dims; up to 5 are understood: say which matrices it holds, by split={'layout': 'batch'}",
        ),
        (
            (4, 3),
            {"rows": 3},
            "has 4 rows, which cannot be cut into 3 equal parts: give a divisor, or a list of sizes",
        ),
        ((4, 3), {"cols": 0}, "has 3 cols, which cannot be cut into 0 equal parts"),
        (
            (4, 3),
            {"rows": [1, 2]},
            "has 4 rows, and the rule's [1, 2] make up 3: give sizes of the whole parameter, not of a shard",
        ),
        (
            (4, 3),
            {"rows": [5, -1]},
            "'rows' of the rule for parameter 'p' is [5, -1]; expected a number of equal parts, or a list",
        ),
        ((4, 3), {"rows": "22"}, "'rows' of the rule for parameter 'p' is '22'"),
        ((4, 3), {"rows": True}, "'rows' of the rule for parameter 'p' is True"),
        ((4, 3), {"rows": 2.0}, "'rows' of the rule for parameter 'p' is 2.0"),
        ((4, 3), {"row": 2}, "the rule for parameter 'p' has 'row'; expected are 'rows', 'cols', 'layout'"),
        ((4, 3), [2, 2], "the rule for parameter 'p' is a list; expected a dict with 'rows'"),
        (
            (4, 3, 2),
            {"layout": "conv"},
            "the layout of parameter 'p' is 'conv'; expected 'batch' or 'convolution'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_parameters_name(
    shape: tuple[int, ...], rule: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        matrices_of(shape, rule, name="p")


@pytest.mark.once
def test_what_is_no_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split is a list; expected a rule .* or a function"):
        rule_for("w", (4, 3), [2, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of which some have a dict and some have not"):
        rule_for("w", (4, 3), {"rows": 2, "*.w": {"rows": 2}})
    with pytest.raises(
        ValueError,
        match=r"split has patterns of names \('\*\.w'\), and the parameters have none: give the optimizer",
    ):
        rule_for("", (4, 3), {"*.w": {"rows": 2}})


@distributed(world_size=1)
def test_the_optimizer_refuses_patterns_that_no_parameter_meets(world: World) -> None:
    platform = world.platform
    names = ("layers.0.wqkv", "layers.0.wo", "layers.1.wqkv", "layers.1.wo")
    pairs = [(name, platform.parameter(platform.zeros((6, 4), "float32", world.device))) for name in names]
    with pytest.raises(
        ValueError,
        match=r"Muon: split has '\*\.wqvk', which no parameter's name meets; the names are layers.0.wqkv, .*, \.\.\.:",
    ):
        Muon(pairs, split={"*.wqkv": {"rows": 3}, "*.wqvk": {"rows": 3}})
    Muon(pairs, split={"*.wqkv": {"rows": 3}, "layers.1.wo": None})
    # Of all groups that have it together.
    groups = [{"params": pairs[:1]}, {"params": pairs[1:2]}]
    Muon(groups, split={"*.wqkv": {"rows": 3}, "*.wo": {"rows": 2}})
    with pytest.raises(
        ValueError,
        match=r"split has '\*\.wo', which no parameter's name meets; the names are layers.0.wqkv: correct",
    ):
        Muon([{"params": pairs[:1], "split": {"*.wqkv": {"rows": 3}, "*.wo": {"rows": 2}}}])
