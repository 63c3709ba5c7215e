"""How messages call a unit and its launches: by its class, and by its place in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
        unit.called(f"{unit.label} {name!r}" if name else unit.label)


class NamedLaunch:
    """While a unit launches: a range for profilers, and what those say of it who wait for a rank. Entered again and again."""

    __slots__ = ("_group", "_label", "_range", "_range_named", "purpose")

    def __init__(
        self,
        group: ProcessGroup,
        label: str,
        range_named: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        """``label``: the range's name; ``range_named`` makes it."""
        self._group, self._label, self._range_named = group, label, range_named
        self._range: AbstractContextManager[Any] | None = None
        self.purpose = ""
        """See :attr:`ProcessGroup.purpose`."""

    def __enter__(self) -> None:
        found = self._range_named(self._label)
        if type(found) is not nullcontext:  # of that nobody need be told: nobody profiles
            self._range = found
            found.__enter__()
        self._group.purpose = self.purpose

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.purpose = ""
        found, self._range = self._range, None
        if found is not None:
            found.__exit__(kind, error, trace)
