"""Which combinations of programs, modes and options are run: every pair of values meets in at least one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Case:
    """One combination, run on every number of ranks. The first value of each factor is what ``fully_shard`` does by itself."""

    program: str
    mode: str
    """``fsdp`` 1-D; ``hsdp`` (2, shards); ``ddp`` (ranks, 1); ``unified`` beside tensor parallel ranks; ``unified hsdp`` the same
    on a 2-D mesh; ``compat`` DTensors over the data-parallel mesh, and no mesh for ``fully_shard``."""
    accumulate: str
    """``no``; two micro-batches of which the first does not reduce (``whole``), or does not reduce replicas (``shards``)."""
    precision: str
    """``wide``; ``low``: computed in a low precision, reduced in the widest; ``main``: and gradients stay in that, in ``main_grad``."""
    offload: bool
    """Whether pieces and gradients stand on the host; nothing changes where that is the device."""
    cut: str
    """Which dim: ``first``, ``last`` (given as -1), or ``second`` (of those that have one)."""
    replicate: bool
    """Whether every unit has parameters that are not cut."""
    reshard: bool | int
    fusion: bool | None
    zero_copy: bool | None
    op: str
    """``mean``, ``sum``, or scaled by a ``number`` or a ``tensor``."""
    last: bool
    """What set_is_last_backward is told; False: hsdp_sync_stream before the optimizer."""
    keep: bool
    """Whether set_reshard_after_backward(False) was called."""
    prefetch: str
    """``auto``, ``lists`` (each unit names the two that follow), or ``none`` (empty lists)."""

    def __str__(self) -> str:
        """What differs from the first values, beside program and mode."""
        chosen = [
            f"{name}={getattr(self, name)}" for name in _OPTIONS if getattr(self, name) != FACTORS[name][0]
        ]
        return " ".join([self.program, self.mode, *chosen])


FACTORS: Mapping[str, tuple[Any, ...]] = {
    "program": ("mlp", "transformer", "lora", "conv", "moe"),
    "mode": ("fsdp", "hsdp", "ddp", "unified", "unified hsdp", "compat"),
    "accumulate": ("no", "whole", "shards"),
    "precision": ("wide", "low", "main"),
    "offload": (False, True),
    "cut": ("first", "last", "second"),
    "replicate": (False, True),
    "reshard": (True, False, 2),
    "fusion": (None, True, False),
    "zero_copy": (None, True, False),
    "op": ("mean", "sum", "number", "tensor"),
    "last": (True, False),
    "keep": (False, True),
    "prefetch": ("auto", "lists", "none"),
}
_OPTIONS = [name for name in FACTORS if name not in ("program", "mode")]
MANAGES_NOTHING = "compat"
"""In this mode units have no parameters, so options of how they are gathered and reduced have nothing to act on: only the
program and accumulation vary."""


def covering_cases() -> list[Case]:
    """A small list in which every allowed pair of values occurs. Always the same one.

    Greedy: each case begins with the first pair that has not occurred, and takes for every other factor the value that
    makes most new pairs with what is chosen already.
    """
    assert [field.name for field in fields(Case)] == list(FACTORS)
    missing = dict.fromkeys(_allowed_pairs())
    found = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name, values in FACTORS.items():
            if name not in chosen:
                allowed = [value for value in values if _is_allowed({**chosen, name: value})]
                chosen[name] = max(allowed, key=lambda value: _num_new(chosen, name, value, missing))
        for pair in _pairs(chosen):
            missing.pop(pair, None)
        found.append(Case(**chosen))
    return found


def _pairs(chosen: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], ...]]:
    return combinations([(name, chosen[name]) for name in FACTORS if name in chosen], 2)


def _allowed_pairs() -> Iterator[tuple[tuple[str, Any], ...]]:
    for one, other in combinations(FACTORS, 2):
        for value in FACTORS[one]:
            for other_value in FACTORS[other]:
                if _is_allowed({one: value, other: other_value}):
                    yield ((one, value), (other, other_value))


def _is_allowed(chosen: Mapping[str, Any]) -> bool:
    if chosen.get("mode") != MANAGES_NOTHING:
        return True
    return all(
        value == FACTORS[name][0]
        for name, value in chosen.items()
        if name not in ("program", "mode", "accumulate")
    )


def _num_new(chosen: Mapping[str, Any], name: str, value: Any, missing: Mapping[Any, None]) -> int:
    return sum(
        tuple(sorted(((name, value), (other, chosen[other])), key=lambda item: list(FACTORS).index(item[0])))
        in missing
        for other in chosen
    )
