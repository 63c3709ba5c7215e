"""The oracle: the unsharded program in one process, on the samples of all data-parallel ranks, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from fsdp_models import LEARNING_RATE, Maker, loss_of
from matrix_modes import Sharded

from hp_platform.testing import World


class Reference:
    """Computes in the dtype in which the case computes; gradients are summed, and parameters kept, in the widest one."""

    def __init__(self, world: World, sharded: Sharded, low: str) -> None:
        self.platform, self.sharded = world.platform, sharded
        self.maker = Maker(world)
        dtype = self.maker.widest if sharded.case.precision == "wide" else low
        self.dtype = self.platform.dtype(dtype)
        wide = sharded.program.build(Maker(world))
        self.values = {n: self._numpy(p) for n, p in self.platform.named_parameters(wide)}
        self.model = sharded.program.build(Maker(world, dtype))
        self.gradients: dict[str, np.ndarray | None] = dict.fromkeys(self.values)
        self._show()

    def run(self, batch: int) -> Any:
        """Forward and backward of a micro-batch. Adds to :attr:`gradients`; returns what this rank's model should."""
        sharded, platform, num_data = self.sharded, self.platform, self.sharded.grid.num_data
        outputs = []
        for rank in range(num_data):
            inputs = sharded.program.inputs(self.maker, rank, batch)
            if platform.is_floating(inputs.dtype):
                inputs = platform.cast(inputs, self.dtype)
            output = self.model(inputs, rank=sharded.branch(rank, batch))
            platform.backward([loss_of(platform, output)])
            outputs.append(platform.detach(output))
            self._collect(num_data)
        return platform.cat(outputs) if sharded.is_compat else outputs[sharded.grid.data_rank]

    def step(self) -> None:
        """Stochastic gradient descent."""
        for name, gradient in self.gradients.items():
            if gradient is not None:
                self.values[name] = self.values[name] - LEARNING_RATE * gradient
                self.gradients[name] = None
        self._show()

    @property
    def norm(self) -> float:
        """Of all gradients together."""
        return float(np.sqrt(sum(float((g * g).sum()) for g in self.gradients.values() if g is not None)))

    def _collect(self, num_data: int) -> None:
        factor = {"mean": 1 / num_data, "sum": 1.0}.get(self.sharded.case.op, 0.25 / num_data)
        for name, parameter in self.platform.named_parameters(self.model):
            gradient = self.platform.get_grad(parameter)
            if gradient is not None:
                before = self.gradients[name]
                new = self._numpy(gradient) * factor
                self.gradients[name] = new if before is None else before + new
                self.platform.set_grad(parameter, None)

    def _numpy(self, x: Any) -> np.ndarray:
        return np.asarray(self.platform.to_numpy(self.platform.detach(x)), self.maker.widest)

    def _show(self) -> None:
        for name, parameter in self.platform.named_parameters(self.model):
            value = self.platform.tensor(self.values[name], self.maker.widest, self.maker.device)
            self.platform.copy_(parameter, value)
