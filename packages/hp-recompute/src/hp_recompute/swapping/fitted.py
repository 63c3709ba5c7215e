"""Layers that are measured in a step, and from then on keep, swap or compute again as :mod:`hp_recompute.swapping.budget` chooses.

[Note: what is measured] Of two steps in which all layers swap, so that the memory of a device is not what ends them, the second one tells the
sizes of the memories that leave. In a third one all are computed again: what then leaves are their arguments, and the time that a
layer takes forward is its own, while one that swaps waits for copies.

[Note: ranks agree] Ranks measure different times. Layers that communicate must be computed again by all ranks or by none: each waits for
the others there. So ranks tell each other what they have measured, the largest of each counts, and all come to the same plan.

[Note: a layer's place] As of other wrappers, a layer stays the object that it is, and how it runs stands on it: another budget replaces that, and a
step that fails takes it away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_platform.collectives import all_gather_object
from hp_platform.group import ProcessGroup
from hp_platform.on_platform import when_known
from hp_platform.platform import Platform, get_platform
from hp_platform.process_groups import is_initialized
from hp_recompute.checkpointing.calls import checkpointed
from hp_recompute.checkpointing.region import Options
from hp_recompute.swapping.agreed import Measured, agree
from hp_recompute.swapping.budget import BudgetPlan, choose
from hp_recompute.swapping.calls import SwapOptions, swapped
from hp_recompute.swapping.choices import LayerCost
from hp_recompute.swapping.copies import Copies
from hp_recompute.swapping.course import Course
from hp_recompute.swapping.group import Group
from hp_recompute.swapping.manager import default_manager
from hp_recompute.swapping.timetable import Rates

MARK = "_hp_fitted"
"""Attribute of a layer: see :class:`FittedForward`."""
_COPIED = 2**26
"""Bytes of the copies by which the rates are measured."""
_ROUNDED = 0.01
"""Of a budget, for what allocators round up."""


def fit(
    model: Any, step: Callable[[], Any], device_budget_bytes: int, process_group: ProcessGroup | None = None
) -> BudgetPlan:
    """See :func:`hp_recompute.swap`."""
    platform = get_platform()
    layers = _layers_of(platform, model)
    parameter = next((x for layer in layers for _, x in platform.named_parameters(layer)), None)
    if parameter is None:
        raise ValueError(
            f"swap with device_budget_bytes finds by their parameters where the layers lie, and these {len(layers)} have none: give the "
            "layers of the model"
        )
    device = platform.device_of(parameter)
    copies = default_manager().copies_of(device)
    if copies is None:
        raise NotImplementedError(
            f"swap with device_budget_bytes on {platform.platform_type.value} {platform.framework_version} on {device}, which has no "
            "memory of its own beside the host's: use checkpoint"
        )
    fitted = FittedLayers(device)
    for place, layer in enumerate(layers):
        if not hasattr(layer, MARK):
            platform.override_forward(layer, _forward)
        setattr(layer, MARK, FittedForward(fitted, place))
    try:
        mine = Measured(
            tuple(_measured(layers, fitted, step)), _rates(platform, copies, device), device_budget_bytes
        )
        all_of_them = [mine]
        if process_group is not None or is_initialized():
            all_of_them = all_gather_object(mine, process_group)
        agreed = agree(all_of_them)
        fitted.plan = choose(agreed.costs, agreed.device_budget_bytes, agreed.rates, _ROUNDED)
    finally:
        if fitted.plan is None:
            for layer in layers:
                setattr(layer, MARK, None)
        default_manager().free_host_memory()  # that of all layers, of which fewer will leave
    return fitted.plan


def _measured(layers: Sequence[Any], fitted: FittedLayers, step: Callable[[], Any]) -> list[LayerCost]:
    """See [Note: what is measured]. The first step warms up: memory of the host, kernels, caches."""
    seen = []
    for measuring in ("swap", "swap", "recompute"):
        calls = fitted.measure(measuring, step)
        if set(calls) != set(range(len(layers))):
            raise ValueError(
                "the step that swap was given with device_budget_bytes did not run all layers: give a function that does a whole step, "
                "forward and backward"
            )
        seen.append(calls)
    _, swapping, again = seen
    return [
        _cost(f"{place} {type(layer).__name__}", swapping[place], again[place])
        for place, layer in enumerate(layers)
    ]


@dataclass
class _Call:
    """A measured call of a layer."""

    group: Group
    start: Any
    end: Any = None

    @property
    def forward_ms(self) -> float:
        return float(self.start.elapsed_ms(self.end))


class FittedLayers:
    """All layers of a call of :func:`fit`."""

    def __init__(self, device: str, plan: BudgetPlan | None = None) -> None:
        self.device, self.plan = device, plan
        self._measuring = "swap"
        """While there is no plan: what all layers do."""
        self._calls: dict[int, list[_Call]] = {}
        self._course: Course | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the layers has a course of its own."""
        return FittedLayers, (self.device, self.plan)

    def measure(self, measuring: str, step: Callable[[], Any]) -> dict[int, list[_Call]]:
        """The calls of a step, by the layer's place."""
        self._measuring, self._calls = measuring, {}
        step()
        get_platform().device(self.device).synchronize()
        calls, self._calls = self._calls, {}
        return calls

    def choice_of(self, place: int) -> tuple[str, int]:
        """What the layer does now, and how many bytes of it stay."""
        if self.plan is None:
            return self._measuring, 0
        layer = self.plan.layers[place]
        return layer.choice, layer.cost.nbytes if layer.choice == "keep" else layer.stays_nbytes

    def enter(self, place: int, group: Group) -> _Call | None:
        """A layer begins its forward, and saves to ``group``. The call, if it is measured."""
        if self.plan is None:
            call = _Call(group, self._event())
            self._calls.setdefault(place, []).append(call)
            return call
        if self._course is None or place <= self._course.place:
            self._course = Course(self.plan.layers, self.plan.timetable, self.device)
        self._course.enter(place, group)
        return None

    def leave(self, place: int, call: _Call | None) -> None:
        """The layer's forward has ended."""
        if call is not None:
            call.end = self._event()
        elif self._course is not None:
            self._course.leave(place)

    def _event(self) -> Any:
        event = get_platform().device(self.device).new_event(timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class FittedForward:
    """The forward of one of the layers."""

    fitted: FittedLayers
    place: int

    def call(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of the layer's own forward."""
        choice, stays_nbytes = self.fitted.choice_of(self.place)
        manager = default_manager()
        has_begun = manager.is_idle

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_begun
            group = None if has_begun else manager.current
            has_begun = True  # a checkpoint may come again
            if group is None:
                return own(*args, **kwargs)
            call = self.fitted.enter(self.place, group)
            out = own(*args, **kwargs)
            self.fitted.leave(self.place, call)
            return out

        if choice == "recompute":
            return checkpointed(run, args, kwargs, Options(swap_inputs=True))
        return swapped(run, args, kwargs, SwapOptions(stays_nbytes=stays_nbytes))


def _forward(module: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fitted: FittedForward | None = getattr(module, MARK)
    return own(*args, **kwargs) if fitted is None else fitted.call(own, args, kwargs)


def _cost(name: str, swapping: Sequence[_Call], again: Sequence[_Call]) -> LayerCost:
    """Of a layer that runs several times in a step, once for each micro-batch, the largest of them."""
    pieces = max((tuple(call.group.movable) for call in swapping), key=sum)
    return LayerCost(
        name,
        sum(pieces),
        min(call.forward_ms for call in again),
        min(max(sum(call.group.movable) for call in again), sum(pieces)),
        pieces,
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


def _rates(platform: Platform, copies: Copies, device: str) -> Rates:
    """Of a copy that is alone, the best of some."""
    there, here = copies.empty_on_device(_COPIED), copies.empty_on_host(_COPIED)
    handle = platform.device(device)

    def rate(copy: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(3):
            handle.synchronize()
            start = time.perf_counter()
            copies.wait(copy())
            handle.synchronize()
            best = min(best, time.perf_counter() - start)
        return _COPIED / (best * 1e3)

    return Rates(
        rate(lambda: copies.to_host([(here, there)])), rate(lambda: copies.to_device([(there, here)]))
    )


@when_known
def _keep_compilers_out(platform: Platform) -> None:
    """Of what a layer says when it begins and ends, whose forward may be compiled."""
    platform.run_uncompiled([FittedLayers.enter, FittedLayers.leave])
