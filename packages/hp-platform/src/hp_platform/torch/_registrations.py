"""How many parameters and modules have been hung into modules of the process: torch calls a hook for each."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as registration

from hp_platform import _process


class _Counter:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self.count = 0
        registration.register_module_parameter_registration_hook(self._came)
        registration.register_module_module_registration_hook(self._came)

    def _came(self, *_: Any) -> None:
        self.count = self.count + 1


def num_registrations() -> int:
    """Since it was asked first."""
    counter = _process.state.registrations
    if counter is None:
        counter = _process.state.registrations = _Counter()
    return counter.count
