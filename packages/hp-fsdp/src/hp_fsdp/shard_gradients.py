"""Where reduced gradients go: to ``.grad`` of the shards, or to ``main_grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.lines import Lines
from hp_fsdp.offload import HOST, HostMemory
from hp_fsdp.parameter import MAIN_GRAD, ManagedParameter
from hp_fsdp.places import Places
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class ShardGradients:
    """What a unit has reduced so far.

    [Note: gradients in the row] A gradient is a part of the reduced line, which is made anew by every step: all gradients of a
    unit lie one after the other, as the shards do. Where parts of a tensor cannot be written, each is a copy.
    """

    def __init__(
        self, platform: Platform, places: Places, *, in_main_grad: bool, host: HostMemory | None = None
    ) -> None:
        """``host``: of offloaded shards, whose gradients are reduced on the device and added up here."""
        self.platform = platform
        self.places = places
        self.in_main_grad = in_main_grad
        self.host = host
        self._shares = platform.supports("write_into_view", places.device if host is None else HOST)
        self._kept: dict[Any, tuple[Lines, Tensor]] = {}

    # --- lines whose replicas have not been reduced yet
    def keep(self, lines: Lines, row: Tensor) -> None:
        """Until the replicas are reduced."""
        self._kept[lines.dtype] = (lines, row)

    def with_kept(self, lines: Lines, row: Tensor) -> Tensor:
        """``row`` and what was kept for it."""
        kept = self._kept.pop(lines.dtype, None)
        if kept is None:
            return row
        before, total = kept
        if before is not lines:
            raise RuntimeError(
                "parameters were frozen or unfrozen while gradients wait for the all-reduce of replicas: change "
                "requires_grad only after a backward with set_requires_all_reduce(True)"
            )
        return self.platform.add_(total, row)

    def forget(self) -> None:
        """Drop what waits."""
        self._kept = {}

    # --- the gradients themselves
    def add(self, params: Sequence[ManagedParameter], parts: Sequence[Tensor]) -> None:
        """Add 1-D ``parts``, each with its padding, to the gradients of the shards."""
        platform = self.platform
        totals, news = [], []
        for param, part in zip(params, parts, strict=True):
            gradient = self._shaped(param, part)
            before = self._before(param)
            if before is not None:
                totals.append(before)
                news.append(gradient)
            elif self.in_main_grad:
                self._set_main_grad(param, gradient)
            else:
                platform.set_grad(param.shard, gradient)
        platform.foreach_add_(totals, news)
        for param in params:
            if param.gradient_hooks:
                param.gradient_hooks.run(param.parameter)

    def _shaped(self, param: ManagedParameter, part: Tensor) -> Tensor:
        platform, slot = self.platform, param.slot
        if slot is not None and param.own_numel != slot.numel:
            part = platform.narrow(part, 0, 0, param.own_numel)
        gradient = platform.reshape(part, param.own_shape)
        if not self.in_main_grad and gradient.dtype != param.dtype:
            return platform.cast(gradient, param.dtype)
        return gradient if self._shares else platform.clone(gradient)

    def _before(self, param: ManagedParameter) -> Tensor | None:
        if not self.in_main_grad:
            return self.platform.get_grad(param.shard)
        before = getattr(param.parameter, MAIN_GRAD, None)
        return None if before is None else before.to_local()

    def _set_main_grad(self, param: ManagedParameter, gradient: Tensor) -> None:
        parameter = param.parameter
        made = DTensor.from_local(
            gradient, parameter.device_mesh, parameter.placements, shape=tuple(parameter.shape)
        )
        setattr(parameter, MAIN_GRAD, made)


def clear_main_grad(param: ManagedParameter) -> None:
    """Forget it."""
    if getattr(param.parameter, MAIN_GRAD, None) is not None:
        setattr(param.parameter, MAIN_GRAD, None)
