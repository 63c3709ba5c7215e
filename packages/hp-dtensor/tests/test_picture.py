"""Pictures: every block with its holders, in text and in files; no communication, any rank may draw."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_dtensor import Partial, Replicate, Shard, show
from hp_dtensor.picture.blocks import picture_of

pytestmark = pytest.mark.once


class _Mesh(SimpleNamespace):
    """A mesh by its numbers: a drawing needs no processes."""

    def __repr__(self) -> str:
        return "the mesh"


def _mesh(*shape: int) -> Any:
    count = 1
    for n in shape:
        count = count * n
    return _Mesh(shape=shape, rank_list=tuple(range(count)))


def test_a_matrix_cut_both_ways_is_drawn_as_rows_and_columns_with_their_ranges() -> None:
    assert show(_mesh(2, 2), [Shard(0), Shard(1)], shape=(5, 8)).splitlines() == [
        "(5, 8) as (Shard(0), Shard(1)) on the mesh",
        "        0:4   4:8   dim 1",
        "dim 0 ┌─────┬─────┐",
        "  0:3 │  0  │  1  │",
        "      ├─────┼─────┤",
        "  3:5 │  2  │  3  │",
        "      └─────┴─────┘",
    ]


@pytest.mark.parametrize(
    ("placements", "label"),
    [
        ([Replicate(), Replicate()], "0, 1, 2, 3"),
        ([Partial(), Partial()], "0 + 1 + 2 + 3"),
        ([Partial(), Replicate()], r"\(0 \+ 2\), \(1 \+ 3\)"),
        ([Replicate(), Partial()], r"\(0 \+ 1\), \(2 \+ 3\)"),
    ],
)
def test_copies_are_told_from_parts(placements: Any, label: str) -> None:
    text = show(_mesh(2, 2), placements, shape=(4,))
    assert re.search(rf"│ {label.replace(' + ', ' [+] ')} │", text), text


def test_ranks_without_elements_are_named() -> None:
    text = show(_mesh(4), [Shard(0)], shape=(2, 3))
    assert text.endswith("without elements: 2, 3")
    assert show(_mesh(2), [Shard(0)], shape=(0, 3)).splitlines()[1:] == [
        "no elements",
        "without elements: 0, 1",
    ]


def test_every_element_is_drawn_once_whatever_is_cut() -> None:
    for mesh_shape, placements, shape in [
        ((2, 2), (Shard(0), Shard(0)), (5, 3)),
        ((2, 3), (Shard(1), Shard(2)), (2, 7, 4)),
        ((2, 2, 2), (Shard(0), Shard(1), Shard(2)), (3, 5, 2)),
        ((3,), (Shard(3),), (1, 2, 1, 4)),
        ((2,), (Replicate(),), ()),
    ]:
        picture = picture_of(_mesh(*mesh_shape), placements, shape, "")
        seen = set()
        for panel in picture.panels:
            for held in panel.cells.values():
                size = 1
                for first, end in held.spans:
                    size = size * (end - first)
                assert size > 0
                assert held.spans not in seen
                seen.add(held.spans)
        total, wanted = 0, 1
        for spans in seen:
            size = 1
            for first, end in spans:
                size = size * (end - first)
            total = total + size
        for n in shape:
            wanted = wanted * n
        assert total == wanted
    # Three cut dims: one panel for each block of the third.
    picture = picture_of(_mesh(2, 2, 2), (Shard(0), Shard(1), Shard(2)), (3, 5, 2), "")
    assert [panel.title for panel in picture.panels] == ["dim 2: 0:1", "dim 2: 1:2"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_drawing_holds_the_labels_of_all_blocks(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"blocks.{suffix}"
    show(_mesh(2, 2), [Shard(0), Partial()], shape=(5, 8), path=path)
    written = path.read_bytes()
    if suffix == "png":
        assert written.startswith(b"\x89PNG")
        return
    # matplotlib writes every text as a comment beside its outlines.
    assert {"0 + 1", "2 + 3"} <= set(re.findall(r"<!-- (.*?) -->", written.decode()))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: show(_mesh(2), [Shard(0)]), "needs shape=, the global shape"),
        (lambda: show(_mesh(2), shape=(3,)), "show takes a DTensor, a Layout with shape=, or a mesh"),
        (lambda: show(_mesh(2), [Shard(2)], shape=(3,)), r"Shard\(2\) does not fit a tensor with 1 dims"),
        (
            lambda: show(_mesh(2), [Shard(0)], shape=(3,), path="x.gif"),
            "suffix .svg, .png, .pdf, got 'x.gif'",
        ),
    ],
)
def test_wrong_calls_say_what_is_missing(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
