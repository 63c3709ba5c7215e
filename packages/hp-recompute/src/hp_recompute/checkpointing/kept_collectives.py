"""Results of communication that the first run keeps, so that the second does not communicate; see :mod:`hp_platform.keeping`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hp_platform import keeping
from hp_platform.containers import map_tensors, tensors_in
from hp_platform.platform import Platform
from hp_platform.recording import Launch
from hp_recompute.checkpointing.errors import CheckpointError
from hp_recompute.checkpointing.policies import CheckpointPolicy, PolicyContext

Quiet = Callable[[], AbstractContextManager[Any]]


def keep_collectives_policy(
    context: PolicyContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """A ``policy_fn`` of :func:`hp_recompute.checkpoint`: what was communicated in forward is kept, and not communicated again in backward.

    Given as it is, or in a list with the operations whose results are kept too: ``[keep_collectives_policy, torch.matmul]``. It is
    about the collectives of :mod:`hp_platform.collectives`: those that are called, redistributions of DTensors and tensor parallel
    styles. Launched again are those that fill memory of the caller's (``out``, overlapped layers) and those of compiled blocks;
    ``fully_shard`` gathers as it does without a policy.

    Memory: the bytes of the results, until the call's backward is over: for a row-wise layer its output, of which nothing more is
    kept. Communication: in backward none of the kept ones, on all ranks alike. Works on every framework.

    Raises ValueError when it is called: it decides about collectives, and not about an operation.
    """
    raise ValueError(
        f"keep_collectives_policy was asked about {operation}: give it to policy_fn as it is, or in a list of operations"
    )


def without_collectives(policy_fn: Any) -> tuple[bool, Any]:
    """Whether collectives are to be kept, and the rest of what was given as ``policy_fn``."""
    if policy_fn is keep_collectives_policy:
        return True, None
    if callable(policy_fn) or isinstance(policy_fn, str) or not isinstance(policy_fn, Iterable):
        return False, policy_fn
    given = list(policy_fn)
    rest = [each for each in given if each is not keep_collectives_policy]
    return len(rest) < len(given), rest or (None if given else rest)


class KeptCollectives:
    """Of one region, in the order in which they were launched."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.results: list[_Result] = []

    def first_run(self, quiet: Quiet = nullcontext) -> AbstractContextManager[None]:
        """Around it. ``quiet``: around what happens in it only."""
        return keeping.entered((*keeping.present(), _First(self, quiet)))

    def second_run(self, quiet: Quiet = nullcontext) -> AbstractContextManager[None]:
        """Around it; there may be several, and one may happen within the first, which does not count it."""
        others = [each for each in keeping.present() if getattr(each, "kept", None) is not self]
        return keeping.entered((*others, _Second(self, quiet)))

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return sum(result.nbytes for result in self.results)


class _Result:
    """Of one collective. Implements :class:`hp_platform.keeping.Place`."""

    def __init__(self, platform: Platform, launch: Launch) -> None:
        self.platform = platform
        self.launch = launch
        self._found: tuple[Any] | None = None
        self._versions: list[int] = []
        self._wait: weakref.WeakMethod[Callable[[], Any]] | None = None

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        tensors = tensors_in(self.platform.is_tensor, self._found)
        return sum(x.numel() * self.platform.itemsize(x.dtype) for x in tensors)

    def fill(self, result: Any) -> None:
        """The tensors themselves become a part of the graph, which would hold what holds it."""
        self._found, self._wait = (self._detached(result),), None
        self._versions = self._counts_of_writes()

    def expect(self, wait: Callable[[], Any]) -> None:
        """Not held: who started it, waits for it or lets it go."""
        if self._found is None:
            self._wait = weakref.WeakMethod(wait)

    def value(self) -> tuple[Any] | None:
        """The result again; None if nobody has waited for it."""
        wait = None if self._wait is None else self._wait()
        if wait is not None:
            wait()
        if self._found is None:
            return None
        if self._counts_of_writes() != self._versions:
            raise CheckpointError(
                f"the result of {self.launch.kind} on the {self.launch.group.describe()} that keep_collectives_policy keeps was changed in "
                "place afterwards, so that it cannot be given again: leave the policy, or the in-place operation"
            )
        return (self._detached(self._found[0]),)

    def _detached(self, value: Any) -> Any:
        return map_tensors(self.platform.is_tensor, self.platform.detach, value)

    def _counts_of_writes(self) -> list[int]:
        tensors = tensors_in(self.platform.is_tensor, self._found)
        return [self.platform.version(x) for x in tensors]


class _First:
    """Implements :class:`hp_platform.keeping.Keeper`."""

    gives = False

    def __init__(self, kept: KeptCollectives, quiet: Quiet) -> None:
        self.kept, self.quiet = kept, quiet

    def keep(self, launch: Launch) -> _Result:
        result = _Result(self.kept.platform, launch)
        self.kept.results.append(result)
        return result

    def take(self, launch: Launch) -> tuple[Any] | None:
        raise AssertionError("a first run gives nothing")


class _Second:
    """Implements :class:`hp_platform.keeping.Keeper`."""

    gives = True

    def __init__(self, kept: KeptCollectives, quiet: Quiet) -> None:
        self.kept, self.quiet = kept, quiet
        self._num_taken = 0

    def keep(self, launch: Launch) -> _Result:
        raise AssertionError("a second run keeps nothing")

    def take(self, launch: Launch) -> tuple[Any] | None:
        number, results = self._num_taken, self.kept.results
        self._num_taken = number + 1
        before = results[number].launch if number < len(results) else None
        if before is None or _told(before) != _told(launch):
            was = "nothing more" if before is None else _told(before)
            raise CheckpointError(
                f"collective {number} of a checkpointed function is {_told(launch)} in its second run, and in the first it was {was}: it "
                "must do the same both times"
            )
        return results[number].value()


def _told(launch: Launch) -> str:
    return f"{launch.kind} of {launch.nbytes:,} bytes on the {launch.group.describe()}"
