"""The page of the docs, made of what is kept of each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_dtensor.rules import RULES
from nox_support.house import ROOT
from op_table.argued import ARGUED
from op_table.table import WITHOUT_CALLS, family, read

PAGE = ROOT / "docs" / "pages" / "operations.md"
NAMES = 6
"""So many functions of a rule are named."""

INTRODUCTION = """# Operations

<!-- Made by `nox -s op-table`: change tools/op_table, not this page. -->

Which operations sharded tensors know, and what each of them moves between ranks before it can run. Functions of a framework
follow a *rule*; rules with the same idea are a family. The calls are those by which the rules are tested; shapes stand for their
tensors, all of them in float64 (complex where the operation needs it) unless they are places or truth values.

The table is for a mesh of two ranks. `S(d)` is `Shard(d)`, `R` is `Replicate()`, `P` is `Partial("sum")`, `value` is a number or
truth value that all ranks get. `S(0) → P` needs no communication. `S(0) → R 50%` does: each rank sends bytes of 50% of the size of
the whole tensor, as a ring does it: gathering a tensor over two ranks is 50%, reducing a sum 100%. Moves of the
inputs and collectives inside of the operation count, those of the backward pass do not. Every placement of every tensor is taken;
all-`R` calls move nothing and are left out. Other kinds of `Partial` are reduced first, but for averages where the operation is
linear, and for all kinds where it only gives values other places (views, `cat`, `flip` and their kin; `neg` makes a maximum a
minimum), if all tensors lie so.

For several tensors the combinations that move nothing are listed, and the others counted.

An asterisk marks a result that is **over-cautious**: the operation would have given the right values on the pieces as they lay, but the
rule moved bytes. That is found by running the plain function on the pieces and trying whether they make up the whole; values
alone say nothing about gradients, so an asterisk is a question to the rule and not yet a defect. On this page: {count}.
Not marked, because the move has a reason that the trial cannot see (`*` and `?` stand for anything): {argued}.

MindSpore: whether something there follows the rule, among its primitives and methods. Rules that MindSpore alone uses show its calls.
"""


def page(tables: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The text of the page."""
    tables = tables or {name: read(name) for name in ("torch", "mindspore")}
    torch, mindspore = tables["torch"]["rules"], tables["mindspore"]["rules"]
    families: dict[str, list[str]] = {}
    for rule in sorted(torch):
        families.setdefault(torch[rule]["family"], []).append(rule)
    marked = sum(_num_over_cautious(row) for entry in torch.values() for row in entry["calls"])
    count = f"{marked} combination{'s' * (marked > 1)}" if marked else "none"
    argued = "; ".join(
        f"{', '.join(f'`{rule}`' for rule in entry.rules)} in {' or '.join(f'`{c}`' for c in entry.combinations)} ({entry.why})"
        for entry in ARGUED
    )
    lines = [INTRODUCTION.format(count=count, argued=argued)]
    for name in sorted(families):
        lines += [
            f"## {name.replace('_', ' ').capitalize()}",
            "",
            "| rule | functions | MindSpore | call | placements |",
            "|---|---|---|---|---|",
        ]
        for rule in families[name]:
            lines += _rows(rule, torch[rule], mindspore[rule])
        lines.append("")
    return "\n".join(lines)


def write() -> None:
    """Into the docs."""
    PAGE.write_text(page(), encoding="utf-8")


def missing(rules: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Rules that a kept table does not know, or shows no call of without a reason."""
    return {
        rule
        for rule in RULES
        if rule not in rules or not (rules[rule]["calls"] or {rule, family(rule)} & set(WITHOUT_CALLS))
    }


def _rows(rule: str, torch: Mapping[str, Any], mindspore: Mapping[str, Any]) -> list[str]:
    functions = _shortened(torch["functions"] or mindspore["functions"])
    head = [f"`{rule}`", functions, "yes" if mindspore["functions"] else "no"]
    calls = torch["calls"] or mindspore["calls"]
    if not calls:
        why = WITHOUT_CALLS.get(rule) or WITHOUT_CALLS[torch["family"]]
        return [_line([*head, "", why])]
    return [
        _line([*(head if i == 0 else ["", "", ""]), f"`{row['call']}`", _placements(row)])
        for i, row in enumerate(calls)
    ]


def _placements(row: Mapping[str, Any]) -> str:
    kept = [f"{given} → {results}" for given, results in row["kept"]]
    if row["tensors"] == 1:
        moved = [
            f"{given} → {results} {percent}%{_star(over)}" for given, results, percent, over in row["moved"]
        ]
        return "<br>".join([*kept, *moved]) or "no placement but R"
    more = row["num_kept"] - len(kept)
    lines = [*(kept or ["nothing is kept"]), *([f"and {more} more"] if more else [])]
    if row["num_moved"]:
        lines.append(f"{row['num_moved']} others move bytes")
    if row["over_cautious"]:
        more = row["num_over_cautious"] - len(row["over_cautious"])
        named = "; ".join(f"{given}{_star(True)}" for given in row["over_cautious"])
        lines.append(f"of these: {named}" + (f" and {more} more{_star(True)}" if more else ""))
    return "<br>".join(lines)


def _num_over_cautious(row: Mapping[str, Any]) -> int:
    if row["tensors"] == 1:
        return sum(over for *_, over in row["moved"])
    return int(row["num_over_cautious"])


def _star(is_over_cautious: bool) -> str:
    return r" \*" if is_over_cautious else ""


def _shortened(names: Sequence[str]) -> str:
    # Names that people write first; operators and writers behind.
    ordered = sorted(names, key=lambda name: (name.startswith("__"), name.endswith("_"), names.index(name)))
    more = len(ordered) - NAMES
    shown = ", ".join(f"`{name}`" for name in ordered[:NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def _line(cells: Sequence[str]) -> str:
    # A bar would end the cell.
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
