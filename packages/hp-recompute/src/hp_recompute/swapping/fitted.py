"""Layers that are measured in a step, and from then on keep, swap or compute again as :mod:`hp_recompute.swapping.budget` chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_platform.platform import Platform, get_platform
from hp_recompute.checkpointing.calls import checkpointed
from hp_recompute.checkpointing.region import Options
from hp_recompute.swapping.budget import BudgetPlan, LayerChoice, LayerCost, choose
from hp_recompute.swapping.calls import SwapOptions, swapped
from hp_recompute.swapping.group import Group
from hp_recompute.swapping.manager import SwapManager, default_manager

_COPIED = 2**25
"""Bytes of the copy by which the rate is measured."""


def fit(model: Any, step: Callable[[], Any], device_budget_bytes: int) -> BudgetPlan:
    """See :func:`hp_recompute.swap`."""
    platform, manager = get_platform(), default_manager()
    layers = _layers_of(platform, model)
    device = platform.device_of(next(x for layer in layers for _, x in platform.named_parameters(layer)))
    if manager.copies_of(device) is None:
        raise NotImplementedError(
            f"swap with device_budget_bytes on {platform.platform_type.value} {platform.framework_version} on {device}, which has no "
            "memory of its own beside the host's: use checkpoint"
        )
    fitted = [FittedForward(platform, device) for _ in layers]
    for layer, each in zip(layers, fitted, strict=True):
        platform.override_forward(layer, each)
    for _ in range(2):  # the first one warms up: memory of the host, kernels, caches
        for each in fitted:
            each.groups.clear()
            each.events.clear()
        step()
    platform.device(device).synchronize()
    if not all(each.groups for each in fitted):
        raise ValueError(
            "the step that swap was given with device_budget_bytes did not run all layers: give a function that does a whole step, "
            "forward and backward"
        )
    costs = [
        LayerCost(f"{number} {type(layer).__name__}", *each.measured())
        for number, (layer, each) in enumerate(zip(layers, fitted, strict=True))
    ]
    plan = choose(costs, device_budget_bytes, _rate(platform, manager, device))
    for each, choice in zip(fitted, plan.layers, strict=True):
        each.groups.clear()
        each.events.clear()
        each.choice = choice
    return plan


@dataclass
class FittedForward:
    """The forward of a layer: measured until there is a choice."""

    platform: Platform
    device: str
    choice: LayerChoice | None = None
    groups: list[Group] = field(default_factory=list)
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def __call__(
        self, module: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.choice is None:
            return swapped(
                lambda *args, **kwargs: self._timed(own, args, kwargs), args, kwargs, SwapOptions()
            )
        if self.choice.choice == "recompute":
            return checkpointed(own, args, kwargs, Options(swap_inputs=True))
        return swapped(own, args, kwargs, SwapOptions(stays_nbytes=self.choice.stays_nbytes))

    def _timed(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group, device = default_manager().current, self.platform.device(self.device)
        start, end = device.new_event(timing=True), device.new_event(timing=True)
        start.record()
        out = own(*args, **kwargs)
        end.record()
        if group is not None:
            self.groups.append(group)
            self.events.append((start, end))
        return out

    def measured(self) -> tuple[int, float]:
        """Bytes and milliseconds of all calls of a step."""
        return (
            sum(group.movable_nbytes for group in self.groups),
            sum(start.elapsed_ms(end) for start, end in self.events),
        )


def _layers_of(platform: Platform, model: Any) -> Sequence[Any]:
    if isinstance(model, (list, tuple)):
        if not model or not all(platform.is_module(each) for each in model):
            raise ValueError(
                "swap with device_budget_bytes takes a model, or a list of its layers, which are modules"
            )
        return list(model)
    if not platform.is_module(model):
        raise ValueError(
            f"swap with device_budget_bytes takes a model, or a list of its layers, got {type(model).__name__}"
        )
    for _, module in platform.named_modules(model):
        layers: list[Any] = [*module] if isinstance(module, platform.ModuleList) else []  # type: ignore[misc]
        if len(layers) > 1:
            return layers
    raise ValueError(
        f"{type(model).__name__} has no ModuleList of several layers: give swap with device_budget_bytes the list of layers"
    )


def _rate(platform: Platform, manager: SwapManager, device: str) -> float:
    """Bytes in a millisecond, to the host."""
    copies, handle = manager.copies_of(device), platform.device(device)
    if copies is None:
        raise AssertionError("asked before")
    source, target = copies.empty_on_device(_COPIED), copies.empty_on_host(_COPIED)
    best = float("inf")
    for _ in range(3):
        handle.synchronize()
        start = time.perf_counter()
        copies.wait(copies.to_host([(target, source)]))
        handle.synchronize()
        best = min(best, time.perf_counter() - start)
    return _COPIED / (best * 1e3)
