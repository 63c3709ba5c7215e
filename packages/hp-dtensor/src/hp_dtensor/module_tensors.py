"""The parameters and buffers of a module by the places where they stand, so that what is shared stays shared.

[Note: ties] A parameter may stand in several places (an embedding and the head behind it). Sharding replaces parameters by
others; if each place were handled alone, the places would hold two parameters that drift apart. So all places of one
parameter are replaced together, and where a user's own code has replaced them one by one, the first replacement goes to all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from hp_dtensor.creation import distribute_tensor
from hp_platform import get_platform

Module = Any
REPLACED = "_hp_dtensor_replaced"
"""Attribute of a parameter whose places in a module others have taken: the name of the function that was called. Optimizers look at
it: who was given the parameter before trains nothing any more."""
PIECE_DEVICE = "_hp_dtensor_piece_device"
"""Attribute of a deferred DTensor: where its piece is to get memory, if not on the device of its mesh (offloaded shards)."""


class Place(NamedTuple):
    """Where a parameter or buffer stands."""

    name: str
    """Full, from the root that was walked."""
    owner: Module
    attribute: str
    tensor: Any


def parameter_places(module: Module) -> list[Place]:
    """Every place of every parameter, also the later ones of shared parameters. A shared module counts once."""
    platform = get_platform()
    return [
        Place(f"{prefix}.{name}" if prefix else name, owner, name, parameter)
        for prefix, owner in platform.named_modules(module)
        for name, parameter in platform.named_parameters(owner, recurse=False, remove_duplicate=False)
    ]


def buffer_places(module: Module) -> list[Place]:
    """Every place of every buffer."""
    platform = get_platform()
    return [
        Place(f"{prefix}.{name}" if prefix else name, owner, name, buffer)
        for prefix, owner in platform.named_modules(module)
        for name, buffer in platform.named_buffers(owner, recurse=False)
    ]


def tied_places(places: Iterable[Place]) -> list[list[Place]]:
    """The places grouped by the tensor that stands there, in order."""
    groups: dict[int, list[Place]] = {}
    for place in places:
        groups.setdefault(id(place.tensor), []).append(place)
    return list(groups.values())


def put_parameter(places: Iterable[Place], dtensor: Any) -> None:
    """Make a DTensor the parameter in these places; it requires grad if it did."""
    platform: Any = get_platform()
    parameter = platform.parameter(dtensor, requires_grad=dtensor.requires_grad)
    for place in places:
        platform.set_parameter(place.owner, place.attribute, parameter)


def replicate_rest(module: Module, mesh: Any) -> None:
    """Parameters and buffers that are still plain become replicated DTensors, each from this rank's own values."""
    for group in tied_places(parameter_places(module)):
        if not is_dtensor(group[0].tensor):
            put_parameter(group, distribute_tensor(group[0].tensor, mesh))
    for group in tied_places(buffer_places(module)):
        if not is_dtensor(group[0].tensor):
            replicated = distribute_tensor(group[0].tensor, mesh)
            for place in group:
                setattr(place.owner, place.attribute, replicated)  # what is persistent stays so


def keep_ties(before: Iterable[Place]) -> None:
    """After a user's code has replaced parameters: places that held one parameter hold one again. See [Note: ties].

    ValueError, naming the places, if they hold DTensors that lie differently.
    """
    platform = get_platform()
    for group in tied_places(before):
        if len(group) == 1:
            continue
        now = []
        for place in group:
            own = dict(platform.named_parameters(place.owner, recurse=False, remove_duplicate=False))
            if place.attribute in own:
                now.append(place._replace(tensor=own[place.attribute]))
        chosen = next((place for place in now if is_dtensor(place.tensor)), None)
        if chosen is None or all(place.tensor is chosen.tensor for place in now):
            continue
        for place in now:
            if is_dtensor(place.tensor) and place.tensor._spec is not chosen.tensor._spec:
                raise ValueError(
                    f"{chosen.name!r} and {place.name!r} are one parameter, but were given {chosen.tensor._spec} and "
                    f"{place.tensor._spec}: place both alike, or untie them first"
                )
            platform.set_parameter(place.owner, place.attribute, chosen.tensor)


def mark_replaced(before: Iterable[Place], by: str) -> None:
    """Parameters that stood in these places and stand in none of them now are marked as :data:`REPLACED` ``by`` the function of this name."""
    platform = get_platform()
    for group in tied_places(before):
        if not any(_stands(platform, place) for place in group):
            setattr(group[0].tensor, REPLACED, by)


def _stands(platform: Any, place: Place) -> bool:
    own = platform.named_parameters(place.owner, recurse=False, remove_duplicate=False)
    return any(name == place.attribute and parameter is place.tensor for name, parameter in own)


def is_dtensor(x: Any) -> bool:
    """Whether it is a DTensor of this library."""
    from hp_dtensor.dtensor import DTensorMethods

    return isinstance(x, DTensorMethods)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not there: close ones, or some that are."""
    names = [n for n in known if n]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"it has {shown_names(names)}"


def shown_names(names: Iterable[str]) -> str:
    """For messages: some names of many."""
    given = list(names)
    more = f", ... ({len(given)} in all)" if len(given) > 8 else ""
    return (", ".join(map(repr, given[:8])) or "none") + more
