"""Parameters that were hung into a model after ``fully_shard``: no unit has them, so nobody would reduce their gradients.

[Note: late parameters] The ranks' values of one that trains would drift apart without a word, so a forward that records refuses it.
Looking through a model takes long, so it is done at the first such forward, and again when the framework tells that modules have been
given parameters or modules since. What was frozen then is only asked whether it trains by now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.marks import OWNER_MARK
from hp_fsdp.owner import Owner
from hp_fsdp.unit import Unit, units_in
from hp_platform import _process

MOST_NAMES = 5
"""That a message lists."""


class LateParameters:
    """What a root knows of them."""

    def __init__(self, root: Unit) -> None:
        self._root = root
        self._platform = root.platform
        self._seen: int | None = None
        """The number of registrations when the model was looked through."""
        self._frozen: list[tuple[str, Any]] = []
        """Late ones that did not train then."""

    def check(self) -> None:
        """RuntimeError with the names of those that train, if the forward that begins is recorded. No communication."""
        platform = self._platform
        if not platform.is_grad_enabled():
            return
        now = platform.num_registrations()
        if now != self._seen:
            found = list(self._found())
            self._refuse(found)
            self._seen, self._frozen = now, found
        elif self._frozen:
            self._refuse(self._frozen)

    def _found(self) -> Iterator[tuple[str, Any]]:
        """Names and parameters."""
        root, platform = self._root, self._platform
        inner = [unit for module in root.modules for unit in units_in(platform, module)]
        others = [unit for context in _process.state.sharded_roots for unit in context.units]
        known = {(id(owner.module), owner.attribute) for owner in _places([*inner, *others])}
        for number, module in enumerate(root.modules):
            where = f"{number}." if len(root.modules) > 1 else ""
            for path, each in platform.named_modules(module):
                for attribute, parameter in platform.named_parameters(each, recurse=False):
                    if (id(each), attribute) not in known and not self._is_cared_for(parameter, inner):
                        name = platform.unwrapped_name(f"{path}.{attribute}" if path else attribute)
                        yield f"{where}{name}", parameter

    def _is_cared_for(self, parameter: Any, inner: list[Unit]) -> bool:
        """Whether somebody else sees to its gradient: a unit that has it in another place, or, of a DTensor, operations on the mesh that
        the ranks of the units are in.
        """
        if getattr(parameter, OWNER_MARK, None) is not None:
            return True
        if not isinstance(parameter, DTensor):
            return False
        ranks = set(parameter.device_mesh.rank_list)
        return any(unit.leaves_dtensors for unit in inner) or ranks >= set(self._root.places.mesh.rank_list)

    def _refuse(self, found: list[tuple[str, Any]]) -> None:
        trains = self._platform.requires_grads([parameter for _, parameter in found])
        names = [repr(name) for (name, _), flag in zip(found, trains, strict=True) if flag]
        if not names:
            return
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise RuntimeError(
            f"of {self._root.label} these parameters were added after fully_shard, and train: {', '.join(names[:MOST_NAMES])}{more}. "
            "No unit has them, so their gradients would not be reduced, and the ranks' values would drift apart: add them before "
            "fully_shard (adapters first, then sharding), freeze them (requires_grad False), or, if each rank is to train values of "
            "its own, add them before it and give them as ignored_params"
        )


def _places(units: Iterable[Unit]) -> Iterator[Owner]:
    """Where parameters hang that units have, or were told to ignore."""
    for unit in units:
        for param in unit.params:
            yield from param.owners
        yield from unit.ignored
