"""The framework's losses on DTensors, and how they are compared with the oracle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import DTensor, Replicate, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World
from hp_tp import vocab_parallel_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from loss_oracle import Loss, check_near, numbers


class Losses:
    """The framework's functions on DTensors of a mesh."""

    def __init__(self, world: World, shape: tuple[int, ...] | None = None) -> None:
        self.world, self.platform = world, world.platform
        self.mesh = init_device_mesh(world.device_type, shape or (world.size,))
        if world.backend == "mindspore":
            from mindspore.mint.nn import functional
        else:
            from torch.nn import functional
        self.functional: Any = functional
        self.dtype = "float64" if self.platform.supports("float64_compute", world.device_type) else "float32"
        # Sums of at most 50 terms near 1 in another order than the oracle's, and values near 10: some units in the last place.
        self.atol = 1e-12 if self.dtype == "float64" else 2e-5

    def tensor(
        self, x: Any, *placements: Any, dtype: str | None = None, requires_grad: bool = False
    ) -> DTensor:
        whole = self.platform.tensor(np.array(x, order="C"), dtype or self.dtype, self.world.device)
        made = distribute_tensor(whole, self.mesh, list(placements))
        return made.requires_grad_() if requires_grad else made

    def cross_entropy(self, logits: Any, loss: Loss, weight: Any = None, target: Any = None) -> Any:
        if target is None:
            target = self.platform.tensor(np.array(loss.target), "int64", self.world.device)
        function, is_mindspore = self.functional.cross_entropy, self.world.backend == "mindspore"
        if is_mindspore and (loss.label_smoothing or not loss.scores.size):
            # MindSpore's own has a kernel neither for smoothing on cpu nor for no rows.
            return vocab_parallel_cross_entropy(
                logits, target, weight=weight, reduction=loss.reduction, label_smoothing=loss.label_smoothing
            )
        return function(
            logits,
            target,
            weight,
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=loss.label_smoothing,
        )

    def check(self, found: Any, logits: Any, loss: Loss, what: str) -> None:
        """Value, and after a backward the gradient of ``logits``, against the oracle."""
        seed = None
        if loss.reduction == "none":
            seed = numbers(*np.shape(loss.target), seed=5)
            placements = [Replicate()] * len(self.mesh.shape)
            (found * self.tensor(seed, *placements)).sum().backward()
        else:
            assert tuple(found.shape) == ()
            found.backward()
        value, gradient = loss.value_and_gradient(seed)
        check_near(found.full_tensor(), value, name=f"{what}: loss", atol=self.atol)
        assert logits.grad.placements == logits.placements
        check_near(logits.grad.full_tensor(), gradient, name=f"{what}: gradient", atol=self.atol)
