"""Parameters with gradients, and functions in the place of Muon's iteration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_platform import get_platform

sys.path.insert(0, str(Path(__file__).parents[1]))
import muon_oracle


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("float32")


def parameter(*shape: int, seed: int = 0) -> Any:
    """With a gradient."""
    platform = get_platform()
    found = platform.parameter(platform.tensor(array(*shape, seed=seed), "float32"))
    platform.set_grad(found, platform.tensor(array(*shape, seed=seed + 100), "float32"))
    return found


def values(*parameters: Any) -> list[np.ndarray]:
    platform = get_platform()
    return [platform.to_numpy(platform.detach(each)) for each in parameters]


def polar(stack: Any) -> Any:
    """Exact, by numpy."""
    platform = get_platform()
    found = np.stack([muon_oracle.polar(matrix) for matrix in platform.to_numpy(stack)])
    return platform.tensor(found, stack.dtype, platform.device_of(stack))


def twice(stack: Any) -> Any:
    return 2 * stack
