"""Which unit is the root: the outermost that runs. It has what all of its units have in common, and stays whole between forward and
backward.
"""

from __future__ import annotations

from hp_fsdp.parts import split_root
from hp_fsdp.runtime import RootContext
from hp_fsdp.unit import Unit, units_in


def context_of(unit: Unit) -> RootContext:
    """The context of a unit that is about to run. A unit that runs first, outside of any other, becomes a root.

    RuntimeError if a unit inside of it is in the middle of a backward.
    """
    if unit.context is not None:
        return unit.context
    units = list(dict.fromkeys(each for module in unit.modules for each in units_in(unit.platform, module)))
    for inner in units:
        if inner.context is not None:
            inner.context.forget_dead_backward()
            if inner.context.in_backward:
                raise RuntimeError(
                    f"{unit.label} was called while {inner.label}, which is inside of it, runs backward: call the outer "
                    "module first"
                )
            with unit.platform.no_grad():
                inner.context.drain()
    split_root(unit)
    units = [*units, *(part for part in unit.parts if part not in units)]
    context = RootContext(unit, units)
    for each in units:
        # Passes of a root that a unit was before are counted by other numbers.
        each.uses = None
        each.reshard()
        each.context = context
    return context


def reshards_after_forward(unit: Unit) -> bool:
    """Whether the unit frees its whole parameters after forward. The root keeps them: backward begins with it, and with the part
    of it that nobody follows.
    """
    if unit.options.reshard_as_told is not None:
        return unit.options.reshard_as_told
    context = unit.context
    assert context is not None
    if context.root is unit or unit.options.reshard_after_forward is False:
        return False
    # The root's head is needed at once; its embedding is not.
    return unit.part_of is not context.root or context.is_followed
