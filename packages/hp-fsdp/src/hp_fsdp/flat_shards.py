"""What an optimizer is told of a unit's rows, so that it updates a row as one tensor; see [Note: shards in the row]."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from hp_platform.protocols.flat_shards import FlatRow

if TYPE_CHECKING:
    from hp_fsdp.unit_parameters import UnitParameters


class UnitRows:
    """Implements :class:`hp_platform.protocols.flat_shards.FlatShards`."""

    def __init__(self, unit: UnitParameters) -> None:
        self._unit = weakref.ref(unit)

    def row_of(self, parameter: Any) -> FlatRow | None:
        """The row of the unit that has this parameter's shard."""
        unit = self._unit()
        if unit is None:
            return None
        for buffer in unit.arrangement.buffers:
            if any(param.parameter is parameter for param in buffer.params):
                return buffer.flat_row()
        return None

    def __reduce__(self) -> Any:
        """The unit stays where it is: a pickled or copied parameter lies in no row."""
        return (NoRows, ())


class NoRows:
    """Of a copied parameter."""

    def row_of(self, parameter: Any) -> FlatRow | None:
        """None."""
        return None
