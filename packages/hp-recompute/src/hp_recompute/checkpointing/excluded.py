"""Parts of a checkpointed function that do not run again.

[Note: excluded] In the first run autograd keeps for such a part what it always does, outside of the region around it; its output is kept,
too, and in the second run stands in its place; what draws random numbers after it goes on as after the part. So backward goes
through the part as through one that is not checkpointed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hp_platform import _process, keeping
from hp_platform.containers import map_tensors
from hp_platform.platform import get_platform
from hp_platform.protocols.local_wrapper import is_local_wrapper
from hp_recompute.checkpointing.errors import CheckpointError
from hp_recompute.checkpointing.region import name_of
from hp_recompute.checkpointing.surroundings import Drawn


def run_once(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)``, once, whatever checkpoints are around it."""
    runs = _process.checkpoint_runs.get()
    again = next((run for run in runs if run.is_again), None)
    if again is not None:
        kept = _taken(again, function)
        _keep(runs[runs.index(again) + 1 :], kept)
        again.region.surroundings.go_on_from(kept.drawn)
        with _unwatched(runs):
            return _as_made_by_operations(function, kept.output)
    if not runs:
        return function(*args, **kwargs)
    with _unwatched(runs), get_platform().saved_tensors_hooks(_as_it_is, _as_it_is):
        out = function(*args, **kwargs)
        drawn = (run.region.surroundings.drawn() for run in runs)
        _keep(runs, _Kept(_taken_out(out), reduce(operator.or_, drawn)))
    return out


@dataclass(frozen=True)
class _Kept:
    """Of one call of a part."""

    output: Any
    drawn: Drawn
    """Random numbers, at its end: what comes after it draws the next ones in the second run, too."""


@contextmanager
def _unwatched(runs: Sequence[Any]) -> Iterator[None]:
    """What is done inside belongs to none of the runs."""
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.region.unwatched())
        stack.enter_context(keeping.entered(()))
        yield


def _keep(runs: Sequence[Any], kept: _Kept) -> None:
    """For the second runs of all of them: any may come."""
    for run in runs:
        run.region.outputs_of_excluded.append(kept)


def _taken(run: Any, function: Callable[..., Any]) -> _Kept:
    """What the second run finds of the first."""
    outputs, number = run.region.outputs_of_excluded, run.num_excluded
    run.num_excluded = number + 1
    if number >= len(outputs):
        raise CheckpointError(
            f"{name_of(function)}, which is excluded from recomputation, is called for the {number + 1}th time in the second run "
            f"and was called {number} times in the first: the function around it must do the same both times"
        )
    kept: _Kept = outputs[number]
    return kept


def _as_it_is(x: Any) -> Any:
    return x


class _Output:
    """A tensor of an output, outside of its graph."""

    def __init__(self, x: Any) -> None:
        platform = get_platform()
        self.rewrap = x.__hp_rewrap__() if is_local_wrapper(x) else None
        local = x.__hp_local__() if is_local_wrapper(x) else x
        self.requires_grad = platform.requires_grad(local)
        self.local = platform.detach(local)
        self._version = self._count_of_writes()

    def _count_of_writes(self) -> int:
        platform = get_platform()
        return platform.version(self.local) if platform.counts_writes(self.local) else 0

    def check(self, function: Callable[..., Any]) -> None:
        """CheckpointError if it was written since: in the second run it would be another one."""
        if self._count_of_writes() != self._version:
            raise CheckpointError(
                f"an output of {name_of(function)}, which is excluded from recomputation, was changed in place afterwards, so that it "
                "cannot be given again: leave the in-place operation, or write to a clone of the output"
            )


def _taken_out(out: Any) -> Any:
    is_tensor = get_platform().is_tensor
    return map_tensors(lambda x: is_local_wrapper(x) or is_tensor(x), _Output, out)


def _as_made_by_operations(function: Callable[..., Any], out: Any) -> Any:
    """Tensors of which operations keep what they kept of the first."""
    platform = get_platform()

    def again(found: _Output) -> Any:
        found.check(function)
        x = platform.detach(found.local)
        if found.requires_grad:
            platform.set_requires_grad_(x, True)
        return x if found.rewrap is None else found.rewrap(x)

    return map_tensors(lambda x: isinstance(x, _Output), again, out)
