"""Optimizers with their state on the host beside such without: the same parameters, the same gradients, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_optim.offload.late import TIMINGS, LateTransfers
from hp_platform.testing import World


def widest(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def has_own_memory(world: World) -> bool:
    return world.platform.supports("streams", world.device)


def ways(world: World, kind: Any) -> Iterator[Any]:
    """The class as it is, and such whose copies are late or early where a copy may go into a part of a tensor."""
    yield kind
    if world.platform.supports("write_into_view", world.device):
        for timing in TIMINGS:
            yield type(kind.__name__, (kind,), {"MAKE_TRANSFERS": staticmethod(timing)})


def late_of(optimizer: Any) -> LateTransfers | None:
    """Its late transfers, if it has such."""
    found = [each for each in optimizer._memory._found.values() if isinstance(each, LateTransfers)]
    return found[0] if found else None


class Twins:
    """Parameters, and equal ones, of an optimizer each."""

    def __init__(
        self,
        world: World,
        shapes: Sequence[tuple[int, ...]],
        kinds: tuple[Any, Any],
        mesh: Any = None,
        *,
        dtype: str | None = None,
        offloaded: dict[str, Any],
        **options: Any,
    ) -> None:
        """``kinds``: the class with state on the host, which has the options ``offloaded``, and the one beside it."""
        self.world, self.platform, self.shapes, self.mesh = world, world.platform, shapes, mesh
        self.dtype = dtype or widest(world)
        self.random = np.random.default_rng(7)
        values = [self.random.uniform(-1, 1, shape) for shape in shapes]
        self.offloaded, self.beside = (
            [self.platform.parameter(self.cut(value)) for value in values] for _ in range(2)
        )
        pairs = [
            [(f"p{at}", p) for at, p in enumerate(parameters)] for parameters in (self.offloaded, self.beside)
        ]
        self.a = kinds[0](pairs[0], **options, **offloaded)
        self.b = kinds[1](pairs[1], **options)

    def cut(self, value: Any) -> Any:
        tensor = self.platform.tensor(np.asarray(value), self.dtype, self.world.device)
        if self.mesh is None:
            return tensor
        last = Shard(0) if tensor.shape else Replicate()
        return distribute_tensor(tensor, self.mesh, [*[Replicate()] * (self.mesh.ndim - 1), last])

    def gradients(self, left_out: tuple[int, ...] = ()) -> None:
        for at, pair in enumerate(zip(self.offloaded, self.beside, strict=True)):
            value = self.random.uniform(-1, 1, self.shapes[at])
            for parameter in pair:
                found = None if at in left_out else self.cut(value)
                if isinstance(parameter, DTensor):
                    parameter.grad = found
                else:
                    self.platform.set_grad(parameter, found)

    def step(self, left_out: tuple[int, ...] = ()) -> None:
        self.gradients(left_out)
        self.a.step()
        self.b.step()

    def bits(self, x: Any) -> Any:
        local = self.platform.detach(x.to_local() if isinstance(x, DTensor) else x)
        return self.platform.to_bits(local)

    def check(self) -> None:
        """The same bits; state on the host, without copies that nobody waited for."""
        late = late_of(self.a)
        assert late is None or late.num_waiting == 0
        for p, q in zip(self.offloaded, self.beside, strict=True):
            np.testing.assert_array_equal(self.bits(p), self.bits(q))
            mine, theirs = self.a.state.get(p) or {}, self.b.state.get(q) or {}
            assert list(mine) == list(theirs)
            for key, value in mine.items():
                if not self.platform.is_tensor(value):
                    assert value == theirs[key]
                    continue
                local = value.to_local() if isinstance(value, DTensor) else value
                if has_own_memory(self.world):
                    assert self.platform.device_of(local) == "cpu"
                transfers = self.a._memory.transfers(self.world.device)
                if transfers is not None and 0 not in local.shape:
                    assert transfers.is_on_host(local)
                assert tuple(value.shape) == tuple(theirs[key].shape)
                assert getattr(value, "placements", None) == getattr(theirs[key], "placements", None)
                np.testing.assert_array_equal(self.bits(value), self.bits(theirs[key]))
