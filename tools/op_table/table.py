"""What the table says of one framework, as it is kept in docs/op_table: measured there, read where the page is made."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from hp_dtensor import _names
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rules import RULES
from hp_platform import get_platform
from nox_support.house import ROOT
from op_table.argued import reason
from op_table.bytes_moved import answer, sketches
from op_table.calls import Call, Sketch, calls
from op_table.could_stay import could_stay, drawn, short

FOLDER = ROOT / "docs" / "op_table"
FRAMEWORKS = ("torch", "mindspore")
KEPT = 8
"""Of several tensors: so many combinations that move nothing are kept by name, the others by their number."""

WITHOUT_CALLS = {
    "cast": "the result has another dtype, and lies as the tensor did",
    "view_as": "as `view`, with the shape of another tensor",
    "random": "every element is drawn by its place in the whole, so nothing is moved",
    "random_composed": "every element is drawn by its place in the whole; poisson, normal and the dropouts make a sum whole first",
    "fill_diagonal_": "in place: every rank writes what it has of the diagonal, and nothing is moved",
    "as_strided": "of tensors that are R only, whose memory it reads; others are refused",
    "by_axis": "MindSpore's spelling of the rule without `_by_axis`",
}
"""Why a rule, or all rules of a family, have no calls in the table of torch."""


def family(rule: str) -> str:
    """The module that a rule stands in."""
    return RULES[rule].plan.__module__.rpartition(".")[2]


def measured(framework: str) -> dict[str, Any]:
    """Of each rule: its family, the framework's functions, and what its calls in the tests give and move."""
    rules: dict[str, Any] = {
        name: {"family": family(name), "functions": _functions(framework, name), "calls": []}
        for name in RULES
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that frameworks call young; the tests see to warnings
        every = list(calls(framework))  # their modules try derivatives while they load
    with warnings.catch_warnings(), get_platform().no_grad():
        warnings.simplefilter("ignore")
        for call in every:
            row = _row(call)
            own = rules[call.rule]["calls"]
            # Many calls differ in what does not matter here: the first one speaks for them.
            if all({**row, "call": ""} != {**other, "call": ""} for other in own):
                own.append(row)
    return {"framework": framework, "rules": dict(sorted(rules.items()))}


def write(found: dict[str, Any]) -> None:
    """Into the file of its framework."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{found['framework']}.json").write_text(text, encoding="utf-8")


def read(framework: str) -> dict[str, Any]:
    """From that file."""
    return json.loads((FOLDER / f"{framework}.json").read_text(encoding="utf-8"))


def _row(call: Call) -> dict[str, Any]:
    tensors = sketches(call)
    platform = get_platform()
    values = [platform.tensor(v, x.dtype) for v, x in zip(drawn(tensors, 0), tensors, strict=True)]
    kept: list[list[str]] = []
    moved: list[list[Any]] = []
    argued: list[str] = []
    for placements in itertools.product(*map(_choices, tensors)):
        if all(p.is_replicate() for p in placements):
            continue
        given = ", ".join(map(short, placements))
        got = answer(call, placements, values)
        results = _joined(got.results)
        if got.share == 0:
            kept.append([given, results])
            continue
        stays = None not in got.results and could_stay(call, tensors, placements)
        has_reason = stays and reason(call.rule, call.words, given) is not None
        if has_reason:
            argued.append(given)
        moved.append([given, results, round(100 * got.share), stays and not has_reason])
    row: dict[str, Any] = {"call": call.words, "tensors": len(tensors), "argued": argued}
    if len(tensors) == 1:
        return {**row, "kept": kept, "moved": moved}
    over_cautious = [given for given, *_, is_over_cautious in moved if is_over_cautious]
    return {
        **row,
        "kept": kept[:KEPT],
        "num_kept": len(kept),
        "num_moved": len(moved),
        "over_cautious": over_cautious[:KEPT],
        "num_over_cautious": len(over_cautious),
    }


def _choices(x: Sketch) -> list[Placement]:
    """What the table tries; truth values have no sum."""
    sums = [] if x.dtype == "bool" else [Partial()]
    return [*map(Shard, range(len(x.shape))), Replicate(), *sums]


def _joined(results: Sequence[Placement | None]) -> str:
    names = list(map(short, results))
    return names[0] if len(set(names)) == 1 else ", ".join(names)


def _functions(framework: str, rule: str) -> list[str]:
    return sorted(dict.fromkeys(_names_of(framework, rule)))


def _names_of(framework: str, rule: str) -> Iterator[str]:
    functions = (*_names.functions(), *_names.in_place())
    if framework == "torch":
        from hp_dtensor._torch.tables import found

        yield from (name for own, name in functions if own == rule and found(name))
        return
    import mindspore

    yield from (name for own, name in _names.primitives() if own == rule)
    other = {name: own for own, name in _names.methods()}
    for own, name in (*functions, *_names.methods()):
        if other.get(name, own) == rule == own and hasattr(mindspore.Tensor, name):
            yield f"Tensor.{name}"
