"""What a checkpoint keeps of the results of operations, beside its arguments.

[Note: selective recompute] A policy is asked for every operation below autograd, so it sees what is really computed: a linear layer as
a product, an operation on a DTensor as the one on its local tensor, together with what it communicates. What it keeps is
given back in the second run without computing, and the rest is computed again. What gives views, writes in place or draws
random numbers (attention with dropout, too) is always done again, whatever the policy says: it costs nothing, changes what exists, or
moves the generator, whose next numbers would be others.

[Note: casts] So are casts: a framework keeps what it cast by itself for as long as autocast lasts, and the first run may find a weight
cast already where the second casts it.

MUST_SWAP keeps a result on the host between the two runs: it moves as what :func:`hp_recompute.swap` saves, and on a device without a
memory of its own stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from hp_platform.platform import Platform, get_platform, require


class CheckpointPolicy(IntEnum):
    """What becomes of an operation's result. The values are those of HyperParallel's API; PREFER is as MUST."""

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_SWAP = 4


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is told beside the operation."""

    is_recompute: bool
    """Whether this is the second run. A policy must decide in it as it did in the first."""


Policy = Callable[..., "CheckpointPolicy | bool"]
KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_SWAP)
"""Answers after which a result is not computed again."""


def checked_policy(platform: Platform, policy_fn: Policy | Iterable[Any]) -> Policy:
    """A policy from what users give: a function, or the operations whose results are kept.

    ValueError for anything else; NotImplementedError where operations cannot be watched.
    """
    require(platform, "operation_dispatch", what="checkpoint with policy_fn")
    if callable(policy_fn):
        return policy_fn
    if not isinstance(policy_fn, Iterable) or isinstance(policy_fn, str):
        raise ValueError(
            f"policy_fn={policy_fn!r}: give a function (context, operation, *args, **kwargs) -> CheckpointPolicy, or a list of the "
            "operations whose results are kept"
        )
    kept: set[Any] = set()
    given = tuple(policy_fn)
    for operation in given:
        found = platform.operations_of(operation)
        if not found:
            raise ValueError(
                f"policy_fn: it is not known which operations {operation!r} is made of; give them themselves (on torch "
                "torch.ops.aten...), or a function that decides"
            )
        kept.update(found)
    return _Keeps(given, frozenset(kept))


@dataclass(frozen=True)
class _Keeps:
    """The policy that a list stands for. A value, so that modules with it can be copied and sent."""

    given: tuple[Any, ...]
    operations: frozenset[Any]

    def __reduce__(self) -> Any:
        """By what was given: operations may differ in another process, and functions are found by name."""
        return _keeps, (self.given,)

    def __call__(self, context: PolicyContext, operation: Any, *args: Any, **kwargs: Any) -> bool:
        return operation in self.operations


def _keeps(given: tuple[Any, ...]) -> Policy:
    return checked_policy(get_platform(), given)


def answer_of(
    policy: Policy, context: PolicyContext, operation: Any, args: Any, kwargs: Any
) -> CheckpointPolicy:
    """True is MUST_SAVE, False MUST_RECOMPUTE. ValueError for an answer that is none."""
    answer = policy(context, operation, *args, **kwargs)
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.MUST_RECOMPUTE
    raise ValueError(
        f"policy_fn answered {answer!r} for {operation}: give a CheckpointPolicy, or True to keep the result and False to compute "
        "it again"
    )
