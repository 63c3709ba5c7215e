"""How messages call a unit and its launches: by its class, and by its place in the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hp_platform.group import ProcessGroup

if TYPE_CHECKING:
    from hp_fsdp.unit import Unit


def name_units(root: Unit, units: Sequence[Unit]) -> None:
    """Tell every unit what to call it, by where its first module is in the root's."""
    names: dict[int, str] = {}
    for module in root.modules:
        for name, found in root.platform.named_modules(module):
            names.setdefault(id(found), name)
    for unit in units:
        name = names.get(id(unit.modules[0]), "")
        unit.name = f"{unit.label} {name!r}" if name else unit.label


class NamedLaunch:
    """While a unit launches: a range for profilers, and what those say of it who wait for a rank."""

    __slots__ = ("_group", "_purpose", "_range")

    def __init__(self, group: ProcessGroup, purpose: str, range_: AbstractContextManager[Any]) -> None:
        self._group, self._purpose, self._range = group, purpose, range_

    def __enter__(self) -> None:
        self._range.__enter__()
        self._group.purpose = self._purpose

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.purpose = ""
        self._range.__exit__(kind, error, trace)
