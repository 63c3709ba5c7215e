"""The root in parts: its large layers (embedding, head) are gathered when they are called, and reduced as soon as they can be.

[Note: parts of the root] Parameters that hang in the outermost module directly, outside of all other units, are often the
largest: gathered together before the first operation and reduced together after the last one, they take part in nothing
else. So a layer of the root that owns parameters of :data:`MIN_NBYTES` and more becomes a unit of its own when the root is
known: the next one is gathered beside what runs now, a head is reduced while the blocks run backward. What the user was told
of the root holds for its parts. The last of them is freed when the root is; one that other units follow (an embedding), as soon
as it is known that they do, after its own forward, and gathered again in backward, as other units are.

[Note: stand-ins] Nobody says that a layer's parameters are used by its forward alone. While the root runs, a part that is not
shown has stand-ins in its places: an operation on one of them gathers the part and goes on with the whole parameter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.unit import UNIT_ATTRIBUTE, Unit, unit_of

MIN_NBYTES = 32 * 1024 * 1024
"""Of the whole parameters of a layer, as they are computed with: below, one more collective costs more than it hides."""


def split_root(root: Unit) -> None:
    """Make units of the root's large layers, where the platform has stand-ins. No communication.

    Not with ``comm_fusion=True``: the way out for a root whose ranks do not all call such a layer.
    """
    platform = root.platform
    if root.parts or not platform.supports("stand_ins", root.places.device) or len(root.modules) > 1:
        return
    if root.options.comm_fusion:
        return  # it asks for one collective per unit
    root.reshard()
    layers: dict[int, list[ManagedParameter]] = {}
    for param in root.params:
        if len(param.owners) == 1 and param.dim is not None and not param.is_alias:
            layers.setdefault(id(param.owners[0].module), []).append(param)
    for params in layers.values():
        module = params[0].owners[0].module
        nbytes = sum(param.whole_nbytes for param in params)
        if module is root.modules[0] or unit_of(module) is not None or nbytes < MIN_NBYTES:
            continue
        if len(params) == len(root.params):
            continue  # nothing else is left to the root
        _make_part(root, module, params)


def _make_part(root: Unit, module: Any, params: list[ManagedParameter]) -> None:
    # Inputs and outputs are cast where the root begins and ends.
    precision = replace(root.options.precision, cast_inputs=False, output_dtype=None)
    options = replace(root.options, precision=precision, forward_prefetch=None, backward_prefetch=None)
    part = Unit(root.platform, [module], root.places, options)
    part.part_of = root
    for param in params:
        root.release(param)
    part.add(params, whole=False)
    part.hooks = type(root.hooks)(part)
    part.hooks.install()
    root.parts.append(part)
    setattr(module, UNIT_ATTRIBUTE, part)
