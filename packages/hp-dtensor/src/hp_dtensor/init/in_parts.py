"""Parameters that stand in their module in several parts: to its own initialisation they are whole.

[Note: initialised as a whole] A style may keep a fused ``weight`` as ``weight_q``, ``weight_k`` and ``weight_v``, with None in its old place.
The module's method writes ``weight``, in bounds that follow from the whole shape. So while the method runs there is one: a DTensor
cut along another dim than the parts, put together from their values. Each rank holds as much of it as of the parts (of a vector,
which has no other dim, it holds the whole), and what was drawn is exchanged: the values are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from hp_dtensor.placements import Placement, Replicate, Shard
from hp_dtensor.spec import make_spec
from hp_platform import get_platform

Module = Any
_ATTRIBUTE = "_hp_dtensor_in_parts"
"""Attribute of a module: name of a parameter -> :class:`InParts`."""


class InParts(NamedTuple):
    """Where the parts of one parameter are."""

    attributes: tuple[str, ...]
    """Of the module; each holds a DTensor. In the parameter's own place is None."""
    dim: int
    """Along which they make up the whole, one after the other."""


def set_in_parts(module: Module, parameters: Mapping[str, InParts]) -> None:
    """Note that parameters of this module stand in parts, for :func:`hp_dtensor.init_parameters`."""
    setattr(module, _ATTRIBUTE, dict(parameters))


def in_parts(module: Module) -> Mapping[str, InParts]:
    """Which parameters of the module stand in parts."""
    found: Mapping[str, InParts] = getattr(module, _ATTRIBUTE, {})
    return found


def whole_name(module: Module, attribute: str) -> str:
    """The name under which the module's own code knows what stands at ``attribute``."""
    return next(
        (name for name, parts in in_parts(module).items() if attribute in parts.attributes), attribute
    )


@contextmanager
def as_wholes(modules: Iterable[Module]) -> Iterator[None]:
    """Parameters in parts stand whole in their places; what was written to them by the end goes to the parts.

    Communication: per parameter and part one all-to-all before and one after; of vectors an all-gather before, and nothing after.
    """
    platform: Any = get_platform()
    places = [(module, *item) for module in modules for item in in_parts(module).items()]
    wholes = []
    try:
        for module, name, parts in places:
            whole = _joined([getattr(module, attribute) for attribute in parts.attributes], parts.dim)
            wholes.append(platform.parameter(whole, requires_grad=False))
            platform.set_parameter(module, name, wholes[-1])
        yield
        for (module, _, parts), whole in zip(places, wholes, strict=True):
            _hand_out(whole, module, parts)
    finally:
        for module, name, _ in places[: len(wholes)]:
            platform.set_parameter(module, name, None)


def _joined(parts: list[Any], dim: int) -> Any:
    mesh, shape = parts[0].device_mesh, list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    between = _between(mesh, shape, dim)
    pieces = [get_platform().detach(part).redistribute(placements=between).to_local() for part in parts]
    return parts[0]._wrap(get_platform().cat(pieces, dim), make_spec(mesh, between, tuple(shape)))


def _hand_out(whole: Any, module: Module, parts: InParts) -> None:
    platform, mesh, placements = get_platform(), whole.device_mesh, whole.placements
    own = [getattr(module, attribute) for attribute in parts.attributes]
    sizes = [part.shape[parts.dim] for part in own]
    for part, piece in zip(own, platform.split(platform.detach(whole._local), sizes, parts.dim), strict=True):
        moved = whole._wrap(piece, make_spec(mesh, placements, tuple(part.shape)))
        platform.copy_(part._local, moved.redistribute(placements=part.placements).to_local())


def _between(mesh: Any, shape: list[int], dim: int) -> list[Placement]:
    """How the whole lies: along its longest other dim."""
    others = [other for other in range(len(shape)) if other != dim]
    if not others:
        return [Replicate()] * len(mesh.shape)
    return [Shard(max(others, key=lambda other: shape[other]))] * len(mesh.shape)
