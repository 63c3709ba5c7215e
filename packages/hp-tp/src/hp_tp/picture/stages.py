"""What a plan does with the tensors at each module's door, for drawing."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor import PrepareModuleInput, Replicate, Shard
from hp_dtensor.placements import Placement
from hp_platform import get_platform
from hp_tp.styles import ColwiseParallel, SequenceParallel
from hp_tp.styles.cutting import CuttingStyle

Module = Any
WHOLE, TOKENS, FEATURES, SUMMANDS, IDS = "whole", "tokens", "features", "summands", "ids"
"""How an activation lies: whole on every rank, cut along tokens or features, a summand on every rank; whole ids of tokens."""
ONCE = "the same"
"""Of a tensor that a module in front of this one has brought along already."""


@dataclass(frozen=True)
class Weight:
    """Of a module, as it stands in ``x @ W``: in features downwards, out features across."""

    cut: str | None
    """"rows", "columns", or None: whole on every rank."""
    is_vector: bool


@dataclass(frozen=True)
class Way:
    """What travels between ranks from one layout to another; empty: nothing."""

    forward: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Stage:
    """One entry of a plan."""

    name: str
    style: str
    note: str
    comes: str
    in_front: Way
    used: str
    weight: Weight | None = None
    gives: str | None = None
    behind: Way = Way()
    leaves: str | None = None


def stages_of(module: Module, plan: Mapping[str, Any], num_ranks: int) -> list[Stage]:
    """One per entry of the plan that moves or cuts something, by the first module that its pattern meets.

    In the order in which the modules stand in the model. ValueError for a pattern that meets none, and for a plan without such
    entries.
    """
    modules = dict(get_platform().named_modules(module))
    order = {name: number for number, name in enumerate(modules)}
    found: list[tuple[int, Stage]] = []
    prepared = {pattern for pattern, style in plan.items() if _moves_input(style)}
    for pattern, style in plan.items():
        name = next((each for each in modules if _meets(pattern, each)), None)
        if name is None:
            raise ValueError(f"the pattern {pattern!r} meets no module of this {type(module).__name__}")
        is_prepared = pattern.rpartition(".")[0] in prepared
        arrives = Replicate() if is_prepared else _arrival(pattern, plan)
        stage = _stage(pattern, modules[name], style, num_ranks, arrives, is_prepared=is_prepared)
        if stage is not None:
            found.append((order[name], stage))
    if not found:
        raise ValueError("the plan has no entry that can be drawn: it cuts no module and moves no input")
    return _without_repetitions([stage for _, stage in sorted(found, key=lambda pair: pair[0])])


def _meets(pattern: str, name: str) -> bool:
    parts, atoms = name.split("."), pattern.split(".")
    return len(parts) == len(atoms) and all(map(fnmatch.fnmatchcase, parts, atoms))


def _moves_input(style: Any) -> bool:
    return isinstance(style, PrepareModuleInput) and bool(
        style.input_layouts and style.desired_input_layouts and style.input_layouts[0]
    )


def _arrival(pattern: str, plan: Mapping[str, Any]) -> Placement:
    """How an input lies of which the style says nothing: as the norm in front hands it out, a DTensor that knows it itself."""
    for name, style in plan.items():
        holder = name.rpartition(".")[0]
        is_in_front = not holder or pattern.startswith(f"{holder}.")
        if is_in_front and isinstance(style, SequenceParallel) and not style.use_local_output:
            return Shard(style.sequence_dim)
    return Replicate()


def _stage(
    name: str, module: Module, style: Any, num_ranks: int, arrives: Placement, *, is_prepared: bool
) -> Stage | None:
    name, kind = name or type(module).__name__, type(style).__name__
    if _moves_input(style):
        (comes, *_), (used, *_) = style.input_layouts, style.desired_input_layouts
        comes, used = comes[0], comes[0] if used is None else used[0]
        return Stage(
            name, kind, "its input", _lies(comes), _way(comes, used, adds=used.is_replicate()), _lies(used)
        )
    if isinstance(style, SequenceParallel):
        part = Shard(style.sequence_dim)
        given, cut = style.input_layouts or part, _lies(part)
        own = get_platform().named_parameters(module)
        weight = Weight(None, is_vector=True) if any(True for _ in own) else None
        in_front = _way(given, part, adds=False)
        return Stage(
            name, kind, _replicas(module, num_ranks), _lies(given), in_front, cut, weight, cut, Way(), cut
        )
    if isinstance(style, CuttingStyle):
        stage = Stage(name, kind, _share(module, num_ranks), WHOLE, Way(), WHOLE)
        if not isinstance(style, ColwiseParallel):
            return _by_rows(stage, module, style)
        comes = arrives if is_prepared or style.input_layouts is None else style.input_layouts
        stage = _by_columns(stage, module, style, comes, is_prepared)
        if _is_replicated(style, num_ranks):
            stage = replace(stage, weight=Weight(None, is_vector=False), note=_replicas(module, num_ranks))
        return stage
    return None


def _by_columns(
    stage: Stage, module: Module, style: CuttingStyle, comes: Placement, is_prepared: bool
) -> Stage:
    whole = Replicate()
    leaves = Shard(-1) if style.output_layouts is None else style.output_layouts
    is_ids = get_platform().layer_kind(module) == "embedding"
    # Every rank has a summand of the gradient of a whole input; where a style in front has brought it, they are added there.
    in_front = Way() if is_ids or is_prepared else _way(comes, whole, adds=True)
    return replace(
        stage,
        comes=IDS if is_ids else _lies(comes),
        in_front=in_front,
        used=IDS if is_ids else WHOLE,
        weight=Weight("columns", is_vector=False),
        gives=FEATURES,
        behind=_way(Shard(-1), leaves, adds=False),
        leaves=_lies(leaves),
    )


def _is_replicated(style: ColwiseParallel, num_ranks: int) -> bool:
    """Whether every rank keeps the projection whole: [Note: replicated keys and values] in :mod:`hp_tp.styles.heads`."""
    wishes = style.wishes
    return wishes.replicate_kv and isinstance(wishes.heads, int) and wishes.heads % num_ranks != 0


def _by_rows(stage: Stage, module: Module, style: CuttingStyle) -> Stage:
    is_ids = get_platform().layer_kind(module) == "embedding"
    wanted: Placement = Replicate() if is_ids else Shard(-1)
    comes = wanted if style.input_layouts is None else style.input_layouts
    leaves = Replicate() if style.output_layouts is None else style.output_layouts
    behind = Way("all-reduce", "") if leaves.is_replicate() else Way("reduce-scatter", "all-gather")
    return replace(
        stage,
        comes=IDS if is_ids else _lies(comes),
        in_front=Way() if is_ids else _way(comes, wanted, adds=False),
        used=IDS if is_ids else FEATURES,
        weight=Weight("rows", is_vector=False),
        gives=SUMMANDS,
        behind=Way() if leaves.is_partial() else behind,
        leaves=_lies(leaves),
    )


def _way(given: Placement, wanted: Placement, *, adds: bool) -> Way:
    """``adds``: behind it every rank computes something else, so gradients that come back are summands."""
    if given.is_replicate():
        if wanted.is_replicate():
            return Way("", "all-reduce" if adds else "")
        return Way("", "all-gather")
    if wanted.is_replicate():
        return Way("all-gather", "reduce-scatter" if adds else "")
    return Way() if _lies(given) == _lies(wanted) else Way("all-to-all", "all-to-all")


def _lies(placement: Placement) -> str:
    """Of (batch, tokens, features)."""
    if placement.is_replicate():
        return WHOLE
    if placement.is_partial():
        return SUMMANDS
    return FEATURES if getattr(placement, "dim", None) in (-1, 2) else TOKENS


def _without_repetitions(stages: Sequence[Stage]) -> list[Stage]:
    """Modules that get the same tensor share what travels: [Note: kept with the tensor] in :mod:`hp_tp.styles.shared`."""
    found: list[Stage] = []
    for stage in stages:
        before = found[-1] if found else None
        shares = (
            before is not None
            and before.style == stage.style
            and before.name.rpartition(".")[0] == stage.name.rpartition(".")[0] != ""
            and (before.comes, before.used) == (stage.comes, stage.used)
            and before.in_front != Way()
        )
        found.append(replace(stage, in_front=Way(ONCE)) if shares else stage)
    return found


def _replicas(module: Module, num_ranks: int) -> str:
    """The shapes of parameters that every rank has whole and uses on its tokens."""
    shapes = [f"({', '.join(map(str, p.shape))})" for _, p in get_platform().named_parameters(module)]
    note = ", gradient all-reduced" if shapes and num_ranks > 1 else ""
    return " ".join(shapes) + note


def _share(module: Module, num_ranks: int) -> str:
    """The shape of the first parameter, and how much of it a rank has."""
    shape = next((tuple(p.shape) for _, p in get_platform().named_parameters(module)), ())
    part = f", 1/{num_ranks} per rank" if num_ranks > 1 else ""
    return f"{' x '.join(map(str, shape))}{part}"
