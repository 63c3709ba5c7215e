"""Whether the second run of a function does what the first did: by the tensors that it saves, or operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from hp_platform.platform import Platform, require
from hp_platform.protocols.tensor import Tensor
from hp_recompute.checkpointing.errors import CheckpointError
from hp_recompute.checkpointing.pausing import Pausing

CHECKS = ("default", "operations", "none")


def check_name(platform: Platform, check: str) -> None:
    """ValueError for what is no check; NotImplementedError where operations cannot be watched, for one that needs it."""
    if check not in CHECKS:
        raise ValueError(f"determinism_check={check!r}: give one of {', '.join(map(repr, CHECKS))}")
    if check == "operations":
        require(platform, "operation_dispatch", what='determinism_check="operations"')


class Agreement(Pausing):
    """Notes the first run, and compares the second.

    ``"default"``: shapes and dtypes of saved tensors. ``"operations"``: also the names of all operations below autograd, and the shapes
    and dtypes of the tensors that they are given, but for casts (see [Note: casts]), which costs the host several times the operation's
    own. ``"none"``: nothing.
    """

    def __init__(self, platform: Platform, check: str) -> None:
        super().__init__()
        self.platform = platform
        self._check = check
        self.watches = check == "operations"
        """Whether operations are looked at, and not only what is saved."""
        self._saved: list[tuple[Any, Any]] = []
        self._operations: list[str] = []

    def first_run(self) -> AbstractContextManager[Any]:
        """Around it."""
        if not self.watches:
            return nullcontext()
        return self.platform.watch_operations(self._note)

    def second_run(self) -> AbstractContextManager[Any]:
        """Around it. CheckpointError inside, at the first operation that differs."""
        if not self.watches:
            return nullcontext()
        return self.platform.watch_operations(self._comparison(iter(self._operations)))

    def saves(self, x: Tensor) -> None:
        """In the first run."""
        if self._check != "none":
            self._saved.append((x.shape, x.dtype))

    def saves_again(self, index: int, x: Tensor) -> None:
        """CheckpointError if it is not like the one before; more than before are told at the end of the run."""
        if self._check == "none" or index >= len(self._saved):
            return
        shape, dtype = self._saved[index]
        if x.shape != shape or x.dtype != dtype:
            name = self.platform.dtype_name
            raise CheckpointError(
                f"saved tensor {index} of a checkpointed function is {name(x.dtype)} of shape {tuple(x.shape)} in its second run "
                f"and was {name(dtype)} of shape {tuple(shape)} in the first: it must do the same both times; "
                'determinism_check="operations" finds the first operation that differs'
            )

    def _note(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if not (self.is_paused or self.is_interrupted or self.platform.is_cast(operation)):
            self._operations.append(_described(self.platform, operation, args))
        return operation(*args, **kwargs)

    def _comparison(self, expected: Iterator[str]) -> Callable[[Any, Any, Any], Any]:
        numbers = count()

        def compare(operation: Any, args: Any, kwargs: Any) -> Any:
            if not (self.is_paused or self.platform.is_cast(operation)):
                number, found = next(numbers), _described(self.platform, operation, args)
                before = next(expected, "nothing: it had ended")
                if found != before:
                    raise CheckpointError(
                        f"operation {number} of a checkpointed function is {found} in its second run, and in the first it was "
                        f"{before}: it must do the same both times"
                    )
            return operation(*args, **kwargs)

        return compare


def _described(platform: Platform, operation: Any, args: Any) -> str:
    shown = [f"{platform.dtype_name(x.dtype)}{list(x.shape)}" for x in args if platform.is_tensor(x)]
    return f"{operation}({', '.join(shown)})"
