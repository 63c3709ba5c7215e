"""What a unit's call returns: in memory of its own, and noticed by backward when gradients come."""

from __future__ import annotations

from functools import partial
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.nodes import output_node
from hp_fsdp.states import Uses
from hp_fsdp.unit import Unit
from hp_platform.containers import map_tensors, tensors_in


class Outputs:
    """Of one unit. The common case, one tensor, takes the host no search.

    [Note: outputs that are parameters] A module may return a parameter, or a view of one (the first rows of a table of positions).
    Re-sharding frees the memory below, so what is handed out is a copy, which autograd records: its gradient is the parameter's.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.platform = unit.platform
        self._tensor: Any = unit.platform.Tensor
        self._plain = (unit.platform.Tensor, unit.platform.Parameter)
        self._end = output_node(unit.platform, unit.places.device)

    def apart(self, output: Any) -> Any:
        """``output``, and nothing of it in the memory of whole parameters. No communication."""
        spans = self._spans()
        if type(output) is self._tensor:
            return self._copied(spans, output)
        return map_tensors(self.platform.is_tensor, partial(self._copied, spans), output) if spans else output

    def _spans(self) -> list[tuple[int, int]]:
        """Where the memory is that re-sharding frees: addresses of its begins and ends."""
        address_of, found = self.platform.data_ptr, []
        for each in (self.unit, *self.unit.parts):
            for whole in each.arrangement.wholes:
                for storage, nbytes in zip(whole.storages, whole.nbytes, strict=True):
                    start = address_of(storage)
                    if start:  # it is not freed already
                        found.append((start, start + nbytes))
        return found

    def _copied(self, spans: list[tuple[int, int]], x: Any) -> Any:
        """A copy of ``x`` if it lies in one of the spans."""
        local = x.to_local() if isinstance(x, DTensor) else x
        if type(local) not in self._plain:
            return x
        try:
            address = self.platform.data_ptr(local)
        except RuntimeError:  # sparse tensors have none
            return x
        for start, end in spans:
            if start <= address < end:
                return self.platform.clone(x)
        return x

    def notice(self, output: Any, uses: Uses) -> bool:
        """Tell the unit when a gradient reaches one of the tensors; whether any of them asks for one."""
        platform, unit, noticed = self.platform, self.unit, False

        def gradient_comes(_: Any) -> None:
            unit.before_backward(uses)

        found = [output] if type(output) is self._tensor else tensors_in(platform.is_tensor, output)
        for x in found:
            if platform.requires_grad(x):
                platform.register_tensor_hook(x, gradient_comes)
                noticed = True
        return noticed

    def attached(self, output: Any, before: Any) -> Any:
        """Floating outputs behind ``before`` in the graph; see [Note: outputs of skipped units] in :mod:`hp_fsdp.hooks`."""
        platform = self.platform
        if before is None:
            before = platform.set_requires_grad_(platform.zeros((), device=self.unit.places.device), True)

        def attach(x: Any) -> Any:
            can = platform.is_floating(x.dtype) and not isinstance(x, DTensor)
            return self._end.apply(before, x) if can else x

        return map_tensors(platform.is_tensor, attach, output)
