"""What every rank does in test_collectives.py: one function per case, each checks its own result.

Cases stand by topic in collective_cases, transfer_cases, group_cases and training_cases.
"""

import importlib
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

CASES: dict[str, Callable[[torch.device], None]] = {}


def case(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CASES[function.__name__] = function
    return function


def all_cases() -> dict[str, Callable[[torch.device], None]]:
    """By name, in the order of the modules."""
    for topic in ("collective", "transfer", "group", "training"):
        importlib.import_module(f"{topic}_cases")
    return CASES


def run_all(device: torch.device) -> dict[str, str]:
    """Every case on one process group: its name and "ok", or how it failed."""
    results = {}
    for name, function in all_cases().items():
        try:
            function(device)
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
    return results


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def filled(device: torch.device, value: float, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count,), value, device=device).to(dtype)


def equal(given: Tensor, expected: list[float]) -> None:
    assert given.tolist() == expected, f"{given.tolist()} instead of {expected}"


REDUCED_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]
