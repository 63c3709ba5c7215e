"""What of a checkpointed call waits on the host between its two runs: its arguments, and results that the policy lets be swapped."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hp_platform.platform import Platform
from hp_recompute.swapping.group import Group
from hp_recompute.swapping.manager import default_manager
from hp_recompute.swapping.storage import SavedTensor


class RegionSwaps:
    """Of one call: a group of the process' :class:`hp_recompute.SwapManager`, which begins when there is something for it.

    Made before the first run begins: in a call that a checkpoint around it will run again nothing is swapped.
    """

    def __init__(self, platform: Platform, name: str, *, swaps_inputs: bool, fused: bool) -> None:
        """``name``: of the function."""
        manager = default_manager()
        self.platform, self._name, self._fused = platform, name, fused
        self._swaps_inputs = swaps_inputs
        self._manager = None if manager.is_idle else manager
        self._group: Group | None = None

    def group(self) -> Group | None:
        """None where nothing is swapped."""
        if self._group is None and self._manager is not None:
            self._group = self._manager.begin(self._name, fused=self._fused)
        return self._group

    def inputs(self) -> AbstractContextManager[Any]:
        """Around where the arguments are saved; see [Note: kept by autograd] in :mod:`hp_recompute.checkpointing.inputs`."""
        group = self.group() if self._swaps_inputs else None
        if group is None:
            return nullcontext()
        return self.platform.saved_tensors_hooks(group.save, SavedTensor.get)

    def end(self, outputs: Any) -> None:
        """The first run has given ``outputs``, or None."""
        if self._group is not None and self._manager is not None:
            self._manager.end(self._group, outputs)
