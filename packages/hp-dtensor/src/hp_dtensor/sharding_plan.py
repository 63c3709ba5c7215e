"""Where the parameters, inputs and outputs of a module shall lie: what a user writes, checked and read.

One spec says how one tensor lies. It is a sequence of placements with one per mesh dim, ``[Shard(0), Replicate()]``; or a
sequence with the name of a mesh dim per tensor dim, ``("dp", "None")``, in which a tuple ``("dp", "tp")`` cuts one tensor dim
over several mesh dims, the first outermost; on a mesh of one dim also a bare placement; or a Layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.aliases import placements_of
from hp_dtensor.layout import Layout
from hp_dtensor.placements import REPLICATE, Placement
from hp_dtensor.spec import make_spec, shown

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class ShardingPlan:
    """How :func:`hp_dtensor.shard_module` shall lay out a module.

    Args:
        plan: full name of a parameter -> one spec. A leading ``"self."`` of a name is ignored, here and below.
        input_plan: ``"input"`` (of the module itself) or ``"a.b.input"`` (of a sub-module) -> what its arguments shall be
            when forward gets them: one spec for the first one, a list of specs by position, or a dict by the argument's name;
            None leaves an argument alone. A list or tuple counts as one spec if all its entries are placements, strings or
            tuples of strings, but a list of tuples of strings is several: for two arguments write ``[(Shard(0),),
            (Replicate(),)]``, or ``[("dp", "None"), ("None",)]``.
        output_plan: the same with ``"output"`` for results; a dict is for a result that is a dict.
        return_local_tensor: names of sub-modules (``""``: the module itself) whose results are handed out as local tensors.

    TypeError if a plan is no dict, or ``return_local_tensor`` no list of names; ValueError for a key with another ending.
    """

    plan: Mapping[str, Any] | None = None
    input_plan: Mapping[str, Any] | None = None
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("plan", "input_plan", "output_plan"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"ShardingPlan({name}=...) takes a dict from names to specs, got {value!r}")
        names = self.return_local_tensor
        if names is not None and not (
            isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
        ):
            raise TypeError(
                f"ShardingPlan(return_local_tensor=...) takes a list of names of sub-modules, got {names!r}"
            )
        for key in self.input_plan or ():
            module_of(key, INPUT)
        for key in self.output_plan or ():
            module_of(key, OUTPUT)


def without_self(name: str) -> str:
    """The name without a leading ``self.``."""
    return name.removeprefix("self.")


def module_of(key: str, door: str) -> str:
    """The sub-module's name in ``"a.b.input"``; ``""`` for ``"input"``. ValueError for another ending than ``door``."""
    name, _, last = without_self(key).rpartition(".")
    if last != door:
        raise ValueError(
            f"{door}_plan has a key {key!r}: it must be {door!r}, or the name of a sub-module and '.{door}', such as "
            f"'layers.0.{door}'"
        )
    return name


# --------------------------------------------------------------------------------------------------------------- one spec
@dataclass(frozen=True)
class Wish:
    """How one tensor shall lie, on a known mesh."""

    mesh: Any
    placements: tuple[Placement, ...]
    ndim: int | None
    """Of the tensor, if names of mesh dims were given for each of its dims."""

    def spec_for(self, shape: Sequence[int], what: str) -> Any:
        """The spec of a tensor of this global shape. ValueError that begins with ``what`` if it does not fit."""
        if self.ndim is not None and self.ndim != len(shape):
            raise ValueError(
                f"{what}: names for {self.ndim} tensor dims, but the tensor of shape {tuple(shape)} has {len(shape)}"
            )
        try:
            return make_spec(self.mesh, self.placements, shape)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error


def is_one_spec(value: Any) -> bool:
    """Whether what a user wrote says how one tensor lies, and not several."""
    if isinstance(value, (Placement, Layout)):
        return True
    if not isinstance(value, (list, tuple)):
        return False
    if isinstance(value, list) and value and all(map(_is_names, value)):
        return False
    return all(isinstance(entry, (Placement, str)) or _is_names(entry) for entry in value)


def _is_names(entry: Any) -> bool:
    return isinstance(entry, tuple) and bool(entry) and all(isinstance(name, str) for name in entry)


def read_wish(value: Any, mesh: Any, what: str) -> Wish:
    """One spec as a user writes it. ValueError that begins with ``what``, such as ``plan['fc.weight']``."""
    if isinstance(value, Layout):
        if value.mesh != mesh:
            raise ValueError(
                f"{what}: the Layout is of {value.mesh}, the plan of {mesh}: make all of one mesh"
            )
        return Wish(mesh, value.placements, value.ndim)
    if not is_one_spec(value):
        raise ValueError(
            f"{what}: {value!r} does not say how a tensor lies; give one placement per mesh dim, such as [Shard(0)], or the "
            f'name of a mesh dim (or "None") per tensor dim, such as ("tp", "None")'
        )
    entries = (value,) if isinstance(value, Placement) else tuple(value)
    num_placements = sum(isinstance(entry, Placement) for entry in entries)
    if num_placements == 0 and entries:
        try:
            return Wish(mesh, placements_of(mesh, entries), len(entries))
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error
    if num_placements < len(entries):
        raise ValueError(
            f"{what}: {shown(entries)} mixes placements with names of mesh dims: use one of them"
        )
    if not entries:  # a 0-d tensor, by names
        return Wish(mesh, (REPLICATE,) * len(mesh.shape), 0)
    if num_placements != len(mesh.shape):
        raise ValueError(
            f"{what}: got {num_placements} placements {shown(entries)} for a mesh of shape {tuple(mesh.shape)}; give one per "
            f"mesh dim, and for several tensors a list of such tuples"
        )
    return Wish(mesh, entries, None)


# ----------------------------------------------------------------------------------------------------------- several specs
@dataclass(frozen=True)
class Wishes:
    """What shall be done with several arguments or results."""

    by_position: tuple[Wish | None, ...] = ()
    by_name: Mapping[str, Wish | None] | None = None
    is_single: bool = False
    """Whether one spec was given, and not a list with one."""


def read_wishes(value: Any, mesh: Any, what: str) -> Wishes:
    """Specs of arguments or results: one, a list of them, or a dict. ValueError that begins with ``what``."""

    def read(one: Any, place: str) -> Wish | None:
        return None if one is None else read_wish(one, mesh, place)

    if value is None:
        return Wishes((), None, True)
    if isinstance(value, Mapping):
        return Wishes((), {name: read(one, f"{what}[{name!r}]") for name, one in value.items()})
    if not is_one_spec(value) and isinstance(value, (list, tuple)):
        return Wishes(tuple(read(one, f"{what}[{i}]") for i, one in enumerate(value)))
    return Wishes((read_wish(value, mesh, what),), None, True)


def meshes_in(value: Any) -> list[Any]:
    """The meshes of all Layouts in what a user wrote."""
    if isinstance(value, Layout):
        return [value.mesh]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [mesh for entry in value for mesh in meshes_in(entry)]
    return []
