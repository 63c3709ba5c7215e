"""``describe``: which parameter lies how, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hp_dtensor.dtensor import DTensorMethods
from hp_platform import get_platform
from hp_platform.overridden import FORWARD_ATTRIBUTE
from hp_platform.recording import CollectiveRecord, record_collectives
from hp_tp.styles.collectives import Collectives, nbytes_of

Module = Any


@dataclass(frozen=True)
class ParameterRow:
    """One place of one parameter."""

    module: str
    """Full name of the module that has it."""
    parameter: str
    """Its own name there."""
    shape: tuple[int, ...]
    """Of the whole."""
    placements: tuple[Any, ...] | None
    """None for a plain parameter, which every rank holds whole."""
    nbytes: int
    """Bytes on this rank."""
    tied_to: str | None
    """Full name under which the same parameter was met before; its bytes are counted there."""


@dataclass(frozen=True)
class ModuleTraffic:
    """What a module in a style sends."""

    declared: Collectives
    """By its style, for plain inputs."""
    forward: tuple[str, ...] | None
    """What was started in its forward during the step that was watched; None without one."""


@dataclass(frozen=True)
class Description:
    """What :func:`describe` found. ``str()`` gives it as a table."""

    rows: tuple[ParameterRow, ...]
    traffic: dict[str, ModuleTraffic]
    """By full name of the module."""
    step: CollectiveRecord | None
    """Everything that was started in the step; None without one."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters on this rank."""
        return sum(row.nbytes for row in self.rows if row.tied_to is None)

    def __str__(self) -> str:
        lines = [("module", "parameter", "shape", "placements", "bytes per rank", "collectives per step")]
        shown: set[str] = set()
        for row in self.rows:
            sent = "" if row.module in shown else _sent(self.traffic.get(row.module))
            shown.add(row.module)
            where = "whole, plain" if row.placements is None else ", ".join(map(repr, row.placements))
            size = f"{row.nbytes:,d}" if row.tied_to is None else f"tied to {row.tied_to}"
            lines.append((row.module, row.parameter, "x".join(map(str, row.shape)), where, size, sent))
        for name, traffic in self.traffic.items():
            if name not in shown:
                lines.append((name, "", "", "", "", _sent(traffic)))
        widths = [max(len(line[column]) for line in lines) for column in range(6)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        text.insert(1, "  ".join("-" * width for width in widths))
        text.append(f"{self.nbytes:,d} bytes of parameters on this rank")
        if self.step is not None:
            kinds = sorted(self.step.counts().items())
            told = ", ".join(
                f"{number} {kind} of {self.step.nbytes(kind):,d} bytes" for kind, number in kinds
            )
            text.append(f"one step: {told or 'no collective'}")
        return "\n".join(text)


def describe(model: Module, step: Callable[[], Any] | None = None) -> Description:
    """How a model is laid out: each parameter with its placements and bytes on this rank, and what its modules send per step.

    Args:
        model: after ``parallelize_module``.
        step: a function that runs a forward and backward of it; all ranks call. What is started in it is counted: for each
            module in a style in its forward, and in all. Without it the table has what the styles say: for plain inputs that lie
            as declared and require a gradient, and plain results; bytes per row of the input. What several modules do with one
            tensor is done once, though each says it. What operations on DTensors send is known by a step alone, and so is what
            ``PrepareModule*`` of hp_dtensor do.

    Communication: that of ``step``. TypeError if ``model`` is no module.
    """
    platform = get_platform()
    if not platform.is_module(model):
        raise TypeError(f"describe takes a module, got {type(model).__name__}")
    rows: list[ParameterRow] = []
    seen: dict[int, str] = {}
    for prefix, owner in platform.named_modules(model):
        for name, parameter in platform.named_parameters(owner, recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            local = parameter._local if isinstance(parameter, DTensorMethods) else parameter
            placements = parameter.placements if isinstance(parameter, DTensorMethods) else None
            before = seen.setdefault(id(parameter), full)
            tied = None if before == full else before
            rows.append(
                ParameterRow(prefix, name, tuple(parameter.shape), placements, nbytes_of(local), tied)
            )
    styled = {
        name: module for name, module in platform.named_modules(model) if hasattr(module, FORWARD_ATTRIBUTE)
    }
    watched: dict[str, list[str]] = {}
    record = None
    if step is not None:
        with record_collectives() as record, _watching(styled, record, watched):
            step()
    traffic = {
        name: ModuleTraffic(_declared(module), None if record is None else tuple(watched.get(name, ())))
        for name, module in styled.items()
    }
    return Description(tuple(rows), traffic, record)


def _declared(module: Module) -> Collectives:
    ask = getattr(getattr(module, FORWARD_ATTRIBUTE), "collectives", None)
    return Collectives() if ask is None else ask(module)


def _sent(traffic: ModuleTraffic | None) -> str:
    if traffic is None:
        return ""
    told = []
    if traffic.forward is not None:
        told.append("forward: " + (", ".join(traffic.forward) or "none"))
    elif traffic.declared.forward:
        told.append("forward: " + ", ".join(map(str, traffic.declared.forward)))
    if traffic.declared.backward:
        told.append("backward: " + ", ".join(map(str, traffic.declared.backward)))
    return "; ".join(told) or "none"


@contextmanager
def _watching(
    modules: dict[str, Module], record: CollectiveRecord, found: dict[str, list[str]]
) -> Iterator[None]:
    """Note for each module what is started while its forward runs."""
    before = {name: getattr(module, FORWARD_ATTRIBUTE) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            setattr(module, FORWARD_ATTRIBUTE, _Watched(before[name], record, found.setdefault(name, [])))
        yield
    finally:
        for name, module in modules.items():
            setattr(module, FORWARD_ATTRIBUTE, before[name])


@dataclass(frozen=True)
class _Watched:
    """A forward that is being watched."""

    forward: Callable[..., Any]
    record: CollectiveRecord
    found: list[str]

    def __call__(self, module: Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = len(self.record.launches)
        result = self.forward(module, own, args, kwargs)
        self.found.extend(f"{launch.kind} {launch.nbytes:,d} B" for launch in self.record.launches[start:])
        return result
