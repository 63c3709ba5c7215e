"""torch.compile beside code that must run as it is: dynamo breaks its graph there, and compiles nothing of it."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch


def run_uncompiled(functions: Iterable[Any], *, recurse: bool = True) -> None:
    """Let dynamo run these functions, and with ``recurse`` all that they call, as they are.

    ``torch._dynamo.disable`` does the same by a wrapper, which costs time in every call, and imports dynamo for everybody.
    """
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    skip = frames._FrameExecStrategy(action.SKIP, action.SKIP if recurse else action.DEFAULT)
    for function in functions:
        function = getattr(function, "__func__", function)  # of classmethods, staticmethods and bound methods
        if isinstance(function, FunctionType):
            if recurse:
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
            frames.set_code_exec_strategy(function.__code__, skip)
