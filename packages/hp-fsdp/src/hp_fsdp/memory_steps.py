"""What lies in a rank's memory at every moment of a training step, by the plan of :func:`hp_fsdp.memory_plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_fsdp.memory import MemoryPlan, UnitMemory

LAYERS: Mapping[str, str] = {
    "shards": "shards",
    "optimizer": "optimizer state",
    "gradients": "gradients of shards",
    "root": "whole: root, and what stays whole",
    "running": "whole: the unit that runs",
    "ahead": "whole: gathered ahead",
    "whole_gradients": "gradients of whole parameters",
    "reductions": "reductions under way",
    "activations": "activations",
}
"""What memory is used for, in the order in which it is stacked, and how a picture calls it."""


NO_ROOT = UnitMemory(
    name="",
    shards=0,
    gradients=0,
    whole=0,
    kept_whole=0,
    staging=0,
    whole_gradients=0,
    reduction=0,
    stays_whole=True,
    is_offloaded=False,
)
"""Of a model that is no unit itself."""


@dataclass(frozen=True)
class Moment:
    """While one unit runs in one direction; or the optimizer."""

    phase: str
    """``"forward"``, ``"backward"`` or ``"optimizer"``."""
    unit: str
    """Its name; empty for the root, and for the optimizer."""
    nbytes: Mapping[str, int]
    """Of each of :data:`LAYERS`, on the device."""

    @property
    def total(self) -> int:
        """Of all layers."""
        return sum(self.nbytes.values())


def moments_of(
    plan: MemoryPlan, *, activations: int | Mapping[str, int], optimizer_state: int
) -> tuple[Moment, ...]:
    """A step after the first two, so that units are gathered ahead and the optimizer has its state.

    Units other than the root run in the order of the plan, and backwards. What the root computes before and after them is a
    moment of its own in both directions. ``activations``: bytes of every unit but the root, or name -> bytes.
    """
    root, *others = plan.units if plan.units[0].name == "" else (NO_ROOT, *plan.units)
    kept = {unit.name: _activations(unit, activations) for unit in (root, *others)}
    always = {
        "shards": plan.shards,
        "optimizer": optimizer_state,
        "root": sum(unit.kept_whole for unit in plan.units) + root.whole,
    }
    forward: list[Moment] = []
    for at in range(-1, len(others) + 1):  # the root before, the others, the root after
        begun, ended = others[: max(at + 1, 0)], others[: max(at, 0)]
        forward.append(
            _moment(
                "forward",
                root if at in (-1, len(others)) else others[at],
                always,
                _gathered(plan, root, others, at, left=ended),
                activations=kept[root.name] + sum(kept[unit.name] for unit in begun),
            )
        )
    # Backward is the forward of the others turned round; those that stay whole do so until their own backward is over.
    turned = others[::-1]
    backward: list[Moment] = []
    for at in range(-1, len(turned) + 1):
        unit = root if at in (-1, len(turned)) else turned[at]
        left = turned[: max(at, 0)]
        reduced = left if unit is root else [*left, unit]
        if at == len(turned):
            reduced = [*left, root]
        of_root = root.whole_gradients  # a head's wait until all is over
        backward.append(
            _moment(
                "backward",
                unit,
                always,
                _gathered(plan, root, turned, at, left=[], stay=turned[max(at, 0) :]),
                gradients=sum(each.gradients for each in reduced if not each.is_offloaded),
                whole_gradients=of_root + (0 if unit is root else unit.whole_gradients),
                reductions=_reductions(left, unit if at >= 0 else None),
                activations=kept[root.name] + sum(kept[each.name] for each in turned[max(at, 0) :]),
            )
        )
    after = {**always, "root": always["root"] - root.whole}
    end = _moment("optimizer", root, after, {}, gradients=plan.gradients)
    return (*forward, *backward, end)


def _moment(
    phase: str, unit: UnitMemory, always: Mapping[str, int], gathered: Mapping[str, int], **layers: int
) -> Moment:
    found = {**always, **layers}
    for name, nbytes in gathered.items():
        found[name] = found.get(name, 0) + nbytes
    return Moment(phase, unit.name, {layer: found.get(layer, 0) for layer in LAYERS})


def _gathered(
    plan: MemoryPlan,
    root: UnitMemory,
    order: Sequence[UnitMemory],
    at: int,
    *,
    left: Sequence[UnitMemory],
    stay: Sequence[UnitMemory] = (),
) -> dict[str, int]:
    """Whole parameters beside the root's while the unit at ``at`` of ``order`` runs; before and behind it is the root."""
    staying = [unit for unit in (*left, *stay) if unit.stays_whole and unit is not root]
    running = [order[at]] if 0 <= at < len(order) else []
    ahead = order[at + 1 : at + 1 + plan.num_ahead] if at < len(order) else []
    there = {id(unit) for unit in staying}
    # A piece that is kept from forward to backward is given up when its unit is gathered.
    begun = [*there, *(id(unit) for unit in (*running, *ahead))]
    pieces = [unit.kept_piece for unit in (*left, *stay) if id(unit) not in begun]
    return {
        "root": sum(unit.whole for unit in staying) + sum(pieces),
        "running": sum(unit.whole for unit in running if id(unit) not in there),
        "ahead": sum(unit.whole for unit in ahead if id(unit) not in there),
    }


def _reductions(left: Sequence[UnitMemory], unit: UnitMemory | None) -> int:
    """Two are under way at most: those of the last two units, until the last of them is over and that of ``unit`` begins."""
    before = sum(each.reduction for each in left[-2:])
    if unit is None:
        return before
    return max(before, unit.reduction + sum(each.reduction for each in left[-1:]))


def _activations(unit: UnitMemory, given: int | Mapping[str, int]) -> int:
    if isinstance(given, Mapping):
        return given.get(unit.name, 0)
    return 0 if unit.name == "" else given
