"""A step whose momentum lies on the host: it travels with the batches.

[Note: momentum of two batches] While the momentum of a batch moves, that of the next one comes from the host, and when that moves, this
one has gone back: below the iterations, which have a stream of their own. A parameter whose matrices stand in batches that
follow each other stays on the device between them; where others stand between, it comes again, and goes back once. So the
device holds the local momentum of the parameters of two batches, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_optim.muon.batches import Batch
from hp_optim.muon.devices import Devices
from hp_optim.muon.step import Step, Updated
from hp_optim.offload.transfers import Transfers
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

Momenta = dict[int, Tensor]
"""By parameter, on the device."""


class OffloadedStep(Step):
    """Some of whose momenta lie on the host."""

    def __init__(
        self,
        platform: Platform,
        updated: Sequence[Updated],
        devices: Devices,
        name_of: Callable[[int], str],
        batches: Sequence[Batch],
        transfers: Mapping[int, Transfers],
    ) -> None:
        """``batches``: in the order in which they will be packed. ``transfers``: of parameters whose momentum is on the host."""
        self._present = list(updated)
        super().__init__(platform, self._present, devices, name_of)
        self._on_host = tuple(each.momentum for each in updated)
        self._transfers = transfers
        self._numbers = [self._wanted(batch) for batch in batches]
        self._place = {id(batch): at for at, batch in enumerate(batches)}
        self._coming: dict[int, tuple[Momenta, list[tuple[Transfers, Any]]]] = {}
        """By place of a batch what it needs, and the events behind what is under way of it."""
        self._leaving: list[tuple[Transfers, Any, list[Tensor]]] = []
        """What the computation has to wait for before its memory is free."""

    def packed(self, batch: Batch) -> Tensor:
        """As without, between the arrival of the momentum and its departure."""
        at = self._place[id(batch)]
        self.finish()
        if at not in self._coming:
            self._fetch(at, {})
        momenta, events = self._coming.pop(at)
        if at + 1 < len(self._numbers):
            self._fetch(at + 1, momenta)
        for transfers, event in events:
            transfers.wait(event)
        for number, momentum in momenta.items():
            self._present[number] = self._present[number]._replace(momentum=momentum)
        row = super().packed(batch)
        self._store({number: momenta[number] for number in batch.due if number in momenta})
        for number in momenta:
            self._present[number] = self._present[number]._replace(momentum=self._on_host[number])
        return row

    def finish(self) -> None:
        """The memory of what leaves is free for the computation's next work."""
        for transfers, event, _ in self._leaving:
            transfers.wait(event)
        self._leaving.clear()

    def end(self) -> None:
        """The memory of all that travels is free, also of what came, or was about to, for batches that a step that failed has not reached."""
        for transfers in dict.fromkeys(self._transfers.values()):
            transfers.settle()
        self._coming.clear()
        self._leaving.clear()

    def _wanted(self, batch: Batch) -> tuple[int, ...]:
        """Parameters whose momentum the batch reads or moves, and which is on the host."""
        named = dict.fromkeys((*batch.due, *(cut.parameter for cut in batch.packed_cuts)))
        return tuple(number for number in named if number in self._transfers)

    def _fetch(self, at: int, here: Momenta) -> None:
        """Let the momenta of a batch come, but for those that are here."""
        platform = self._platform
        momenta: Momenta = {}
        pairs: dict[Transfers, list[tuple[Tensor, Tensor]]] = {}
        for number in self._numbers[at]:
            if number in here:
                momenta[number] = here[number]
                continue
            source, parameter = self._on_host[number], self._present[number].parameter
            device = platform.device_of(parameter)
            momenta[number] = platform.empty(tuple(source.shape), source.dtype, device)
            pairs.setdefault(self._transfers[number], []).append((momenta[number], source))
        events = [
            (transfers, transfers.fetch(found, [transfers.present()])) for transfers, found in pairs.items()
        ]
        self._coming[at] = momenta, events

    def _store(self, moved: Momenta) -> None:
        pairs: dict[Transfers, list[tuple[Tensor, Tensor]]] = {}
        for number, momentum in moved.items():
            pairs.setdefault(self._transfers[number], []).append((self._on_host[number], momentum))
        for transfers, found in pairs.items():
            event = transfers.store(found, [transfers.present()])
            self._leaving.append((transfers, event, [momentum for _, momentum in found]))
