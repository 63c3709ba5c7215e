"""One call whose intermediate results are computed again in backward instead of being kept.

[Note: handles] During the first run autograd hands every tensor that it would save to :meth:`Region.pack`, and keeps the handle that it
gets instead. Backward asks for the tensor behind a handle; the first such question runs the function again on the same
arguments, and notes what is saved this time, by its place in the order. So no module or tensor is treated in a special way,
calls nest, and any part of the graph can go backward in any order, any number of times.

[Note: early stop] The second run ends, by an exception, as soon as everything that is still wanted is there: what comes after the last
saved tensor is not computed again. What is wanted are the handles that live: of a graph of which a part is gone the rest.

[Note: backward inside] A function may ask for gradients itself (forces of an energy). Then the second run happens within the first, up to
where that one is, and what watches the first does not count it. In the second run nothing runs a third time: its own graph
has what it saved.

[Note: once asked, gone] A value goes to who asks and is forgotten; what nobody asked for is forgotten when the backward ends. Another
backward through a retained graph computes again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hp_platform import _process
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor
from hp_recompute.checkpointing.agreement import Agreement
from hp_recompute.checkpointing.contexts import Contexts, check_can_be_entered, contexts_of
from hp_recompute.checkpointing.errors import CheckpointError
from hp_recompute.checkpointing.inputs import KeptInputs
from hp_recompute.checkpointing.kept_collectives import KeptCollectives
from hp_recompute.checkpointing.kept_results import KeptResults
from hp_recompute.checkpointing.policies import Policy
from hp_recompute.checkpointing.surroundings import Surroundings
from hp_recompute.checkpointing.swaps import RegionSwaps


@dataclass(frozen=True)
class Options:
    """How a call is checkpointed; see :func:`hp_recompute.checkpoint`."""

    keeps_random: bool = True
    early_stop: bool = True
    determinism_check: str = "default"
    policy: Policy | None = None
    context_fn: Callable[[], Contexts] | None = None
    swap_inputs: bool = False
    group_swap: bool = False
    keeps_collectives: bool = False


class _Handle:
    """What autograd keeps in the place of a tensor."""

    __slots__ = ("__weakref__", "index", "region")

    def __init__(self, region: Region, index: int) -> None:
        self.region, self.index = region, index


class _Stop(BaseException):
    """Everything that was wanted is there; see [Note: early stop]. No error: a function that does something else where its first try fails
    (``except Exception``) does not take it for one.
    """

    def __init__(self, run: _SecondRun) -> None:
        super().__init__()
        self.run = run


class Region:
    """See [Note: handles]."""

    def __init__(
        self, platform: Platform, function: Callable[..., Any], arguments: tuple[Any, Any], options: Options
    ) -> None:
        self.platform = platform
        self.function = function
        self.options = options
        self.swaps = RegionSwaps(
            platform, name_of(function), swaps_inputs=options.swap_inputs, fused=options.group_swap
        )
        with self.swaps.inputs():
            self.inputs = KeptInputs(platform, arguments)
        self.kept: KeptResults | None = None
        if options.policy is not None:
            self.kept = KeptResults(platform, options.policy, self.swaps)
        self.collectives = KeptCollectives(platform) if options.keeps_collectives else None
        self.agreement = Agreement(platform, options.determinism_check)
        self.surroundings = Surroundings(
            platform, sorted(self.inputs.devices), keeps_random=options.keeps_random
        )
        self.handles: list[weakref.ref[_Handle]] = []
        self.outputs_of_excluded: list[Any] = []
        """Of modules that do not run again, in order."""
        self._values: dict[int, _Saved] = {}
        self.is_in_first_run = False
        self._forward_context, self._again_context = contexts_of(options.context_fn)

    @contextmanager
    def _under_way(self, run: Any) -> Iterator[None]:
        """Those inside find the run; see :mod:`hp_recompute.checkpointing.excluded`."""
        token = _process.checkpoint_runs.set((*_process.checkpoint_runs.get(), run))
        try:
            yield
        finally:
            _process.checkpoint_runs.reset(token)

    def first_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result."""
        out = None
        try:
            out = self.run_first(args, kwargs)
        finally:
            self.swaps.end(out)
        return out

    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under the hooks that keep handles."""
        with ExitStack() as stack:
            stack.enter_context(self._in_first_run())
            stack.enter_context(self._under_way(_FirstRun(self)))
            stack.enter_context(self.platform.saved_tensors_hooks(self.pack, self.unpack))
            if self.kept is not None:
                stack.enter_context(self.kept.first_run())
            if self.collectives is not None:
                stack.enter_context(self.collectives.first_run(self.unwatched))
            stack.enter_context(self.agreement.first_run())  # sees what the policy does not let be done again
            stack.enter_context(self._forward_context)
            return self.function(*args, **kwargs)

    def pack(self, x: Tensor) -> _Handle:
        """What is kept instead of ``x``."""
        handle = _Handle(self, len(self.handles))
        self.handles.append(weakref.ref(handle))
        self.agreement.saves(x)
        return handle

    def unpack(self, handle: _Handle) -> Tensor:
        """What stands behind a handle."""
        if handle.index in self._values:
            return self._values.pop(handle.index).value(self)
        with ExitStack() as stack:
            if self.is_in_first_run:  # see [Note: backward inside]
                stack.enter_context(self.agreement.interrupted())
                if self.kept is not None:
                    stack.enter_context(self.kept.interrupted())
            values = self._run_again()
        value = values.pop(handle.index).value(self)
        if self.platform.is_in_backward():  # which asks for the others, too
            self.platform.queue_backward_callback(self._values.clear)
            self._values.update(values)
        return value

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What is done inside does not run twice, or is the checkpoint's own work."""
        with self.agreement.paused(), nullcontext() if self.kept is None else self.kept.paused():
            yield

    @contextmanager
    def _in_first_run(self) -> Iterator[None]:
        self.is_in_first_run = True
        try:
            yield
        finally:
            self.is_in_first_run = False

    def _run_again(self) -> dict[int, _Saved]:
        """What is saved this time, of what is wanted."""
        platform = self.platform
        args, kwargs = self.inputs.again()
        run = _SecondRun(self)
        with ExitStack() as stack:
            stack.enter_context(self._under_way(run))
            stack.enter_context(self.surroundings.restored())
            stack.enter_context(platform.enable_grad())
            stack.enter_context(platform.saved_tensors_hooks(run.pack, run.unpack))
            if self.kept is not None:
                stack.enter_context(self.kept.second_run())
            if self.collectives is not None:
                stack.enter_context(self.collectives.second_run(self.unwatched))
            stack.enter_context(self.agreement.second_run())
            check_can_be_entered(self._again_context, name_of(self.function))
            stack.enter_context(self._again_context)
            try:
                self.function(*args, **kwargs)
            except _Stop as stop:
                if stop.run is not run:  # of a call around this one
                    raise
        run.check()
        return run.values


@dataclass(frozen=True)
class _Saved:
    """A tensor that the second run saved, and how often it had been written then."""

    tensor: Tensor
    version: int

    def value(self, region: Region) -> Tensor:
        """RuntimeError if the function has written it since, as of autograd itself."""
        if region.platform.version(self.tensor) != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: {name_of(region.function)} "
                f"writes to a tensor of shape {tuple(self.tensor.shape)} after it was saved for backward; without the checkpoint this "
                "fails as well: write to a clone"
            )
        return self.tensor


class _FirstRun:
    """Of a region."""

    is_again = False

    def __init__(self, region: Region) -> None:
        self.region = region


class _SecondRun:
    """What autograd saves while the function runs again."""

    is_again = True

    def __init__(self, region: Region) -> None:
        self.region = region
        self._stops_early = region.options.early_stop or region.is_in_first_run
        self.num_excluded = 0
        """How many modules that do not run again have been passed."""
        self.values: dict[int, _Saved] = {}
        self._num_saved = 0
        self._wanted = {index for index, handle in enumerate(region.handles) if handle() is not None}
        self._num_missing = len(self._wanted)

    def pack(self, x: Tensor) -> Tensor:
        """Notes ``x``. The graph of this run keeps it too: the function may go backward inside of itself."""
        index, self._num_saved = self._num_saved, self._num_saved + 1
        agreement, detach = self.region.agreement, self.region.platform.detach
        if agreement.watches:
            with agreement.paused():
                kept = detach(x)
        else:  # once per saved tensor
            kept = detach(x)
        agreement.saves_again(index, x)
        if index in self._wanted:
            self.values[index] = _Saved(kept, self.region.platform.version(kept))
            self._num_missing = self._num_missing - 1
            if self._num_missing == 0 and self._stops_early:
                raise _Stop(self)
        return kept

    def unpack(self, kept: Tensor) -> Tensor:
        """The graph of this run."""
        return kept

    def check(self) -> None:
        """That everything came."""
        num_first = len(self.region.handles)
        if self._num_missing or (not self._stops_early and self._num_saved != num_first):
            raise CheckpointError(
                f"the second run of {name_of(self.region.function)} saved {self._num_saved} tensors for backward, and the first "
                f"{num_first}: it must do the same both times. What it decides by must not change between forward and backward "
                "(counters, caches, data-dependent branches, modules that train one time and not the other); "
                'determinism_check="operations" finds the first operation that differs'
            )


def name_of(function: Callable[..., Any]) -> str:
    """For messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
