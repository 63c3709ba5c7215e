"""torch.compile and DTensors: dynamo breaks its graph where DTensors meet operations, and compiles nothing of the dispatch."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch


def run_uncompiled(functions: Iterable[Any]) -> None:
    """Let dynamo run these functions, and all that they call, as they are.

    ``torch._dynamo.disable`` does the same by a wrapper, which costs time in every call, and imports dynamo for everybody.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        function = getattr(function, "__func__", function)  # of classmethods and staticmethods
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            frames.set_code_exec_strategy(function.__code__, skip)


def functions_of(cls: type, base: type) -> Iterable[Any]:
    """The functions that ``cls`` and its bases before ``base`` define."""
    for part in cls.__mro__[: cls.__mro__.index(base)]:
        for value in vars(part).values():
            yield from (value.fget, value.fset) if isinstance(value, property) else (value,)
