"""Complex parameters: their gradients are reduced as those of others where the backend can, and are refused by name where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.lines import Lines
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, local, make_mesh

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "apart": {"comm_fusion": False},
    "copied": {"comm_fusion_zero_copy": False},
    "reduced in float32": {"mp_policy": MixedPrecisionPolicy(reduce_dtype="float32")},
}


def build(world: World, dtype: str) -> Any:
    """``(x W^T + b) s`` of complex numbers, and a real vector behind it."""
    platform, generator = world.platform, np.random.default_rng(5)

    def made(*shape: int) -> Any:
        x = generator.normal(size=shape) + 1j * generator.normal(size=shape)
        return platform.parameter(platform.tensor(x, dtype, world.device))

    class Filter(platform.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias, self.scale = made(5, 4), made(5), made()
            self.real = Maker(world).parameter(5)

        def forward(self, x: Any) -> Any:
            y = (x @ self.weight.T + self.bias) * self.scale
            return (y.real * self.real).sum() + y.imag.sum()

    return Filter()


@pytest.mark.parametrize("kind", list(OPTIONS))
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@distributed(world_size=(1, 3, 4), backends=("torch", "cuda"))
def test_complex_parameters_train_as_in_one_process(world: World, kind: str, dtype: str) -> None:
    platform = world.platform
    generator = np.random.default_rng(7)
    numbers = generator.normal(size=(world.size, 2, 4)) + 1j
    batches = [platform.tensor(each, dtype, world.device) for each in numbers]
    limit = 1e-4 if dtype == "complex64" or "float32" in kind else 1e-12
    for replicas in (1, 2) if world.size == 4 else (1,):
        reference, model = build(world, dtype), build(world, dtype)
        fully_shard(model, make_mesh(world, replicas), **OPTIONS[kind])
        for _ in range(2):
            platform.backward([reference(x) * (1 / world.size) for x in batches])
            platform.backward([model(batches[world.rank])])
        for (name, ours), (_, theirs) in zip(
            platform.named_parameters(model), platform.named_parameters(reference), strict=True
        ):
            found = platform.get_grad(local(ours))
            assert platform.dtype_name(found.dtype) == platform.dtype_name(theirs.dtype)
            assert_parity(ours.grad, platform.get_grad(theirs), rtol=0.0, atol=limit, name=name)


@pytest.mark.parametrize("kind", list(OPTIONS))
@distributed(world_size=2, backends=("torch", "cuda"))
def test_gradients_that_are_marked_as_conjugates_are_reduced_as_such(world: World, kind: str) -> None:
    """torch works conjugates out where they are read, and what is sent is what lies in memory."""
    platform = world.platform

    class Correlated(platform.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = platform.parameter(platform.tensor(np.ones((4, 2)) + 2j, "complex64", world.device))

        def forward(self, x: Any) -> Any:
            return (self.weight.conj() * x).sum().real

    numbers = np.random.default_rng(world.rank).normal(size=(4, 2, 2)).view(np.complex128)[..., 0]
    x = platform.tensor(numbers, "complex64", world.device)
    plain = Correlated()
    platform.backward([plain(x)])
    assert platform.get_grad(plain.weight).is_conj()
    values = [
        np.random.default_rng(rank).normal(size=(4, 2, 2)).view(np.complex128)[..., 0] for rank in (0, 1)
    ]
    take, taken = Lines.take_gradients, []

    def taking(lines: Lines) -> Any:
        taken.append(take(lines))
        return taken[-1]

    for replicas in (1, 2):
        model = fully_shard(Correlated(), make_mesh(world, replicas), **OPTIONS[kind])
        with patch.object(Lines, "take_gradients", taking):
            platform.backward([model(x)])
        expected = (sum(values) / 2).astype(np.complex64)
        assert_parity(model.weight.grad, expected, rtol=0.0, atol=1e-5, name=f"{replicas} replicas")
    assert [[x.is_conj() for x in each] for each in taken] == [[False]] * 2


@distributed(world_size=2, backends="mindspore")
def test_where_nobody_reduces_them_they_are_refused_by_name(world: World) -> None:
    model = build(world, "complex64")
    message = (
        r"parameter 'weight' is complex64, and mindspore on cpu reduces no complex gradients: keep its real"
    )
    with pytest.raises(NotImplementedError, match=message):
        fully_shard(model, make_mesh(world))
    for name in ("weight", "bias", "scale"):
        world.platform.set_requires_grad_(getattr(model, name), False)
    assert type(fully_shard(model, make_mesh(world))).__name__ == "HSDPFilter"
