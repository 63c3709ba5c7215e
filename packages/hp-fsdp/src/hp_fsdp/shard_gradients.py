"""Where reduced gradients go: to ``.grad`` of the shards, or to ``main_grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import DTensor
from hp_dtensor.dtensor import local_tensors
from hp_fsdp.lines import Lines
from hp_fsdp.marks import MAIN_GRAD
from hp_fsdp.offload import HOST, HostMemory
from hp_fsdp.parameter import ManagedParameter
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
        platform, in_main_grad = self.platform, self.in_main_grad
        gradients = self._shaped(params, parts)
        shards = local_tensors([param.parameter for param in params])
        before = [self._main_grad(param) for param in params] if in_main_grad else platform.get_grads(shards)
        if in_main_grad:
            for param, gradient, known in zip(params, gradients, before, strict=True):
                if known is None:
                    self._set_main_grad(param, gradient)
        elif all(known is None for known in before):
            platform.set_grads(shards, gradients)
        else:
            for shard, gradient, known in zip(shards, gradients, before, strict=True):
                if known is None:
                    platform.set_grad(shard, gradient)
        both = [(known, x) for known, x in zip(before, gradients, strict=True) if known is not None]
        if both:
            platform.foreach_add_([total for total, _ in both], [new for _, new in both])
        for param in params:
            if param.gradient_hooks.hooks:
                param.gradient_hooks.run(param.parameter)

    def _shaped(self, params: Sequence[ManagedParameter], parts: Sequence[Tensor]) -> list[Tensor]:
        """Without padding, in the shapes and dtypes of the gradients."""
        platform = self.platform
        reshape, in_main_grad, shares = platform.reshape, self.in_main_grad, self._shares
        found = []
        for param, part in zip(params, parts, strict=True):
            if param.is_padded:
                part = platform.narrow(part, 0, 0, param.own_numel)
            gradient = reshape(part, param.own_shape)
            if not in_main_grad and gradient.dtype != param.dtype:
                gradient = platform.cast(gradient, param.dtype)
            elif not shares:
                gradient = platform.clone(gradient)
            found.append(gradient)
        return found

    def _main_grad(self, param: ManagedParameter) -> Tensor | None:
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
