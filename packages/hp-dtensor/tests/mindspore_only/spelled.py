"""Calls of MindSpore's functions on DTensors beside functions on plain tensors: values and gradients, in several placements."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, assert_parity

SAMPLES = 4
"""Combinations of placements per call."""


def check_call(
    world: World,
    name: str,
    call: Callable[..., Any],
    expected: Callable[..., Any],
    tensors: Sequence[Any],
    tolerance: float = 1e-8,
) -> None:
    """``call`` on DTensors against ``expected`` on the tensors as they are, which gives plain tensors."""
    mesh = init_device_mesh(world.device_type, (world.size,))
    leaves = [_leaf(x) for x in tensors]
    whole = _results(expected(*leaves))
    seeds = [None if not _is_floating(y) else _ramp(y) for y in whole]
    grads = _gradients(whole, leaves, seeds)
    choices = [[*map(Shard, range(x.ndim)), Replicate()] for x in tensors]
    combinations = list(itertools.product(*choices))
    for places in random.Random(len(combinations)).sample(combinations, min(SAMPLES, len(combinations))):
        label = f"{name} of {places}"
        given = [distribute_tensor(x, mesh, [place]) for x, place in zip(tensors, places, strict=True)]
        given = [x.requires_grad_(True) if _is_floating(x) else x for x in given]
        found = _results(call(*given))
        assert len(found) == len(whole), f"{label}: {len(found)} results, expected {len(whole)}"
        loss: Any = 0
        for y, value, seed in zip(found, whole, seeds, strict=True):
            assert isinstance(y, DTensor), f"{label} left the DTensors"
            assert_parity(y.detach(), get_platform().detach(value), rtol=0, atol=tolerance, name=label)
            if seed is not None:
                loss = loss + (y * seed).sum()
        if not any(grad is not None for grad in grads):
            continue
        loss.backward()
        for i, (x, grad) in enumerate(zip(given, grads, strict=True)):
            if grad is not None:
                own = x.grad if x.grad is not None else x.detach() * 0
                assert_parity(own, grad, rtol=0, atol=tolerance, name=f"{label}: gradient {i}")


def _results(found: Any) -> list[Any]:
    given = list(found) if isinstance(found, (list, tuple)) else [found]
    return [y for y in given if y is not None]


def _is_floating(x: Any) -> bool:
    return get_platform().is_floating(x.dtype)


def _leaf(x: Any) -> Any:
    leaf = get_platform().clone(x)
    return get_platform().set_requires_grad_(leaf, True) if _is_floating(leaf) else leaf


def _ramp(y: Any) -> Any:
    platform, count = get_platform(), 1
    for n in y.shape:
        count = count * n
    ramp = platform.reshape(platform.arange(1, count + 1), tuple(y.shape))
    return platform.cast(ramp, platform.dtype_name(y.dtype)) * 0.25


def _gradients(whole: Sequence[Any], leaves: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    platform = get_platform()
    pairs = [(y, s) for y, s in zip(whole, seeds, strict=True) if s is not None and platform.requires_grad(y)]
    asked = [x for x in leaves if platform.requires_grad(x)]
    if not pairs or not asked:
        return [None] * len(leaves)
    found = iter(platform.grad([y for y, _ in pairs], asked, [s for _, s in pairs], allow_unused=True))
    grads = [next(found) if platform.requires_grad(x) else None for x in leaves]
    return [
        platform.zeros_like(platform.detach(x)) if g is None and platform.requires_grad(x) else g
        for x, g in zip(leaves, grads, strict=True)
    ]
