"""The multiplier of the learning rate at a step: by what the peak rate is multiplied. All schedules, each formula once.

``s``: the step, from 0; ``W``: steps of warm-up; ``T``: total steps; ``m = lr_min / lr``: the multiplier at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}
"""Ways from 1 at ``x = 0`` down to 0 at ``x = 1``: the decays of WSD. ``exponential`` is half of one, stretched to end at 0."""


def warmup(step: int, num_steps: int, start: float, peak: float) -> float:
    """In a straight line from ``start`` at step 0 to ``peak`` at step ``num_steps``; as a multiple of ``peak``."""
    return (start + (peak - start) * step / num_steps) / peak


def linear(step: int, begin: int, end: int, floor: float) -> float:
    """``max(m, 1 - r)``: down to 0 at ``end`` in a straight line, which stops where it meets the floor."""
    return max(floor, 1 - _progress(step, begin, end))


def cosine(step: int, begin: int, end: int, floor: float) -> float:
    """``(1 + cos(pi r)) / 2 * (1 - m) + m``: half a wave between 1 and the floor (SGDR, arXiv 1608.03983, without restarts)."""
    return SHAPES["cosine"](_progress(step, begin, end)) * (1 - floor) + floor


def warmup_stable_decay(step: int, total: int, num_decay: int, shape: str, floor: float) -> float:
    """1 until ``num_decay`` steps before ``total``, then ``c(x) (1 - m) + m`` with ``c`` of :data:`SHAPES`, the floor from ``total``
    on (MiniCPM, arXiv 2404.06395).
    """
    begin = total - num_decay
    if step < begin:
        return 1.0
    if step >= total:
        return floor
    return SHAPES[shape](_progress(step, begin, total)) * (1 - floor) + floor


def _progress(step: int, begin: int, end: int) -> float:
    """Which part of the way from ``begin`` to ``end`` is done: from 0 to 1."""
    return 1.0 if step >= end else max(0.0, (step - begin) / (end - begin))
