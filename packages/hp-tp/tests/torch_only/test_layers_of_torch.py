"""Layers that only torch has: convolutions, derived layers, modules of several parameters; and what is kept in memory."""

from __future__ import annotations

import gc
import io
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, distributed
from hp_tp import ColwiseParallel, ModuleCuts, RowwiseParallel, SequenceParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent.parent))
from tp_models import dtype_of, make_mesh, tolerance

BACKENDS = ("torch", "cuda", "npu")


def options(world: World) -> dict[str, Any]:
    return {"dtype": getattr(torch, dtype_of(world)), "device": world.device}


def values(world: World, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).sub(0.5).to(**options(world))


def filled(world: World, module: nn.Module) -> nn.Module:
    module = module.to(**options(world))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(values(world, *parameter.shape, seed=seed))
    return module


class Convolutions(nn.Module):
    def __init__(self, kind: Any, channels: int) -> None:
        super().__init__()
        self.inner, self.outer = kind(3, channels, 3, padding=1), kind(channels, 2, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(nn.functional.gelu(self.inner(x)))


@distributed(world_size=(1, 2, 3), backends=BACKENDS)
def test_convolutions_are_cut_by_channels(world: World) -> None:
    for kind, dims in ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)):
        if world.backend == "npu" and dims == 3:
            continue  # the emulator of the device has no 3-D convolution
        for batch in ((2,), ()):
            models = [filled(world, Convolutions(kind, 7)) for _ in range(2)]
            parallelize_module(
                models[1], make_mesh(world), {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
            )
            assert models[1].inner.weight.placements == (Shard(0),)
            assert models[1].outer.weight.placements == (Shard(1),)
            inputs = [values(world, *batch, 3, *(5,) * dims).requires_grad_() for _ in models]
            results = [model(x) for model, x in zip(models, inputs, strict=True)]
            for y in results:
                (y * y).mean().backward()
            limits = tolerance(world)
            assert_parity(results[1], results[0], **limits, name="output")
            assert_parity(inputs[1].grad, inputs[0].grad, **limits, name="input")
            for (name, ours), theirs in zip(
                models[1].named_parameters(), models[0].parameters(), strict=True
            ):
                assert_parity(ours.grad.full_tensor(), theirs.grad, **limits, name=name)


class Doubled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * times, self.bias)


@distributed(world_size=2, backends=BACKENDS)
def test_a_derived_linear_runs_its_own_forward_on_pieces(world: World) -> None:
    for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
        layers = [filled(world, Doubled(6, 4)) for _ in range(2)]
        parallelize_module(layers[1], make_mesh(world), style)
        x = values(world, 3, 6)
        expected, found = (layer(x, times=3) for layer in layers)
        assert_parity(found, expected, **tolerance(world), name="output")
        for y in (expected, found):
            (y * y).sum().backward()
        assert_parity(
            layers[1].weight.grad.full_tensor(), layers[0].weight.grad, **tolerance(world), name="weight"
        )


@distributed(world_size=2, backends=BACKENDS)
def test_the_rms_norm_of_torch_runs_on_pieces_and_over_cut_dims_on_dtensors(world: World) -> None:
    mesh = make_mesh(world)
    for shape, normalized in (((2, 4, 6), (6,)), ((2, 4, 6), (4, 6))):
        norms = [filled(world, nn.RMSNorm(normalized)) for _ in range(2)]
        parallelize_module(norms[1], mesh, SequenceParallel())
        x = values(world, *shape)
        expected, found = norms[0](x), norms[1](distribute_tensor(x, mesh, [Shard(1)]))
        assert isinstance(found, DTensor)
        assert_parity(found.full_tensor(), expected, **tolerance(world), name="output")
        (expected * x).sum().backward()
        (found * distribute_tensor(x, mesh)).sum().backward()
        assert_parity(
            norms[1].weight.grad.full_tensor(), norms[0].weight.grad, **tolerance(world), name="weight"
        )


@distributed(world_size=2, backends=("torch", "cuda"))
def test_under_autocast_results_have_the_dtype_of_one_process(world: World) -> None:
    """And values that differ by the rounding of a sum of two halves: 3 bits of bfloat16's 8, near 1."""
    for out in (Replicate(), Shard(1)):
        models = [filled(world, nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))) for _ in range(2)]
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=out, use_local_output=False)}
        models = [model.float() for model in models]
        parallelize_module(models[1], make_mesh(world), plan)
        x = values(world, 2, 4, 6).float()
        with torch.autocast(world.device_type, torch.bfloat16):
            expected, found = (model(x) for model in models)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert_parity(found.full_tensor(), expected, rtol=0.0, atol=2.0**-5, name="output")
        for y in (expected, found):
            y.float().sum().backward()
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert ours.grad.dtype == theirs.grad.dtype == torch.float32
            assert_parity(ours.grad.full_tensor(), theirs.grad, rtol=2.0**-5, atol=2.0**-5, name="gradient")


@distributed(world_size=2, backends=BACKENDS)
def test_grouped_convolutions_are_refused(world: World) -> None:
    layer = nn.Conv1d(4, 4, 3, groups=2).to(world.device)
    with pytest.raises(
        ValueError, match="channels of convolutions with one group, this Conv1d has 2: say cuts="
    ):
        parallelize_module(layer, make_mesh(world), ColwiseParallel())
    cuts = ModuleCuts({"weight": 0, "bias": 0}, feature_dim=-2)
    assert parallelize_module(layer, make_mesh(world), ColwiseParallel(cuts=cuts)).weight.placements == (
        Shard(0),
    )


@distributed(world_size=2, backends=("torch", "cuda"))
def test_nothing_stays_in_memory_when_a_loss_is_dropped(world: World) -> None:
    """Neither of a leaf, whose graph holds it, nor of what was computed."""
    mesh = make_mesh(world)
    layer = filled(world, nn.Linear(6, 4))
    parallelize_module(layer, mesh, ColwiseParallel())
    gc.collect()
    gc.disable()
    try:
        for make in (lambda x: x, lambda x: x * 2):
            leaf = values(world, 3, 6).requires_grad_()
            x = make(leaf)
            y = layer(x)
            alive = [weakref.ref(leaf), weakref.ref(x), weakref.ref(y)]
            del leaf, x, y
            assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()


@distributed(world_size=2, backends=("torch",))
def test_checkpointed_layers_give_the_same_gradients(world: World) -> None:
    from torch.utils.checkpoint import checkpoint

    mesh, found = make_mesh(world), []
    for use_reentrant in (None, False, True):
        model = filled(world, nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = values(world, 3, 6).requires_grad_()
        y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
        (y * y).sum().backward()
        found.append([x.grad, *(p.grad.full_tensor() for p in model.parameters())])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


@distributed(world_size=2, backends=("torch",))
def test_a_module_in_a_style_is_pickled_by_the_name_of_its_class(world: World) -> None:
    from hp_platform.overridden import override

    layer = filled(world, nn.Linear(6, 4))
    override(layer, "forward", Twice())
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    x = values(world, 3, 6)
    assert type(again) is type(layer)
    assert torch.equal(again(x), layer(x))
    assert torch.equal(again(x), 2 * nn.functional.linear(x, layer.weight, layer.bias))


@distributed(world_size=2, backends=("torch",))
def test_a_module_in_a_style_is_saved_with_its_style(world: World) -> None:
    model = filled(world, nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 6)))
    parallelize_module(model, make_mesh(world), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    x = values(world, 3, 6)
    assert torch.equal(again(x), model(x))
    assert again[0].weight.placements == (Shard(0),)


class Twice:
    """A forward that gives the double."""

    def __call__(self, module: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return 2 * own(*args, **kwargs)
