"""Results of operations that the first run keeps, and the second takes; see [Note: selective recompute]."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hp_platform.containers import map_tensors, tensors_in
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor
from hp_recompute.checkpointing.errors import CheckpointError
from hp_recompute.checkpointing.pausing import Pausing
from hp_recompute.checkpointing.policies import (
    KEPT,
    CheckpointPolicy,
    Policy,
    PolicyContext,
    answer_of,
)
from hp_recompute.checkpointing.swaps import RegionSwaps
from hp_recompute.swapping.group import Group
from hp_recompute.swapping.storage import SavedTensor


class KeptResults(Pausing):
    """Of one region, by operation in the order in which it ran."""

    def __init__(self, platform: Platform, policy: Policy, swaps: RegionSwaps) -> None:
        super().__init__()
        self.platform = platform
        self.policy = policy
        self.swaps = swaps
        self._kept: dict[Any, list[_Result]] = {}

    def first_run(self) -> AbstractContextManager[Any]:
        """Around it."""
        return self.platform.watch_operations(self._first)

    def second_run(self) -> AbstractContextManager[Any]:
        """Around it; there may be several."""
        return self.platform.watch_operations(_Again(self))

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return sum(result.nbytes for results in self._kept.values() for result in results)

    def answer(self, is_recompute: bool, operation: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """What becomes of the operation's result."""
        platform = self.platform
        if self.is_paused or platform.is_cast(operation):
            return CheckpointPolicy.MUST_RECOMPUTE
        if not platform.can_be_kept(operation, args, kwargs):
            return CheckpointPolicy.MUST_RECOMPUTE
        return answer_of(self.policy, PolicyContext(is_recompute), operation, args, kwargs)

    def taken(self, operation: Any, number: int) -> Any:
        """The result of an operation's call with this number."""
        results = self._kept.get(operation, [])
        if number >= len(results):
            raise CheckpointError(
                f"{operation} is kept by the policy for the {number + 1}th time in the second run, and was kept {len(results)} times "
                "in the first: the policy, or the function, must do the same both times"
            )
        return results[number].value(operation)

    def _first(self, operation: Any, args: Any, kwargs: Any) -> Any:
        out = operation(*args, **kwargs)
        if not self.is_interrupted:
            answer = self.answer(False, operation, args, kwargs)
            if answer in KEPT:
                group = self.swaps.group() if answer is CheckpointPolicy.MUST_SWAP else None
                self._kept.setdefault(operation, []).append(_Result(self.platform, out, group))
        return out


class _Again:
    """One second run."""

    def __init__(self, kept: KeptResults) -> None:
        self._kept = kept
        self._numbers: dict[Any, int] = {}

    def __call__(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if self._kept.answer(True, operation, args, kwargs) not in KEPT:
            return operation(*args, **kwargs)
        number = self._numbers.get(operation, 0)
        self._numbers[operation] = number + 1
        return self._kept.taken(operation, number)


class _Result:
    """The tensors of one, and how often they had been written; or what stands for those that ``group`` swaps."""

    def __init__(self, platform: Platform, out: Any, group: Group | None) -> None:
        self.platform = platform
        # Not the tensors themselves: the caller's would be given to a second graph.
        self._out = map_tensors(platform.is_tensor, platform.detach_watched, out)
        if group is not None:
            self._out = map_tensors(platform.is_tensor, group.save, self._out)
        self._versions = [platform.version(x) for x in self._tensors()]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(x.numel() * self.platform.itemsize(x.dtype) for x in self._tensors())

    def value(self, operation: Any) -> Any:
        """The result again."""
        if [self.platform.version(x) for x in self._tensors()] != self._versions:
            raise CheckpointError(
                f"a result of {operation} that the policy keeps was changed in place afterwards, so that it cannot be given again: "
                "let the policy recompute it, or leave the in-place operation"
            )
        out = map_tensors(lambda x: isinstance(x, SavedTensor), SavedTensor.get, self._out)
        return map_tensors(self.platform.is_tensor, self.platform.detach_watched, out)

    def _tensors(self) -> list[Tensor]:
        return list(tensors_in(self.platform.is_tensor, self._out))
