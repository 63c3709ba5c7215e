"""Quantised weights by extensions: int8 rows as in the guide, and a tensor subclass with the methods of PyTorch's FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.unit import units_in
from hp_platform import collectives
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from fsdp_models import make_mesh

TORCH = ("torch", "cuda")


class Int8Rows:
    """The extension of the guide: rows travel as int8, each with a scale of its own."""

    def fsdp_pre_all_gather(self, shard: torch.Tensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        scales = (shard.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
        return ((shard / scales).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        values, scales = outputs
        if out is not None:
            torch.mul(values.to(dtype), scales.to(dtype), out=out)
            return None
        whole = values.to(dtype) * scales.to(dtype)
        return whole, (whole,)


def make(world: World) -> torch.nn.Sequential:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(32, 31), torch.nn.GELU(), torch.nn.Linear(31, 32)]
    return torch.nn.Sequential(*layers).to(world.device)


def straight_through(x: torch.Tensor) -> torch.Tensor:
    """The quantised weight, with the gradient of the weight."""
    extension = Int8Rows()
    outputs, _ = extension.fsdp_pre_all_gather(x.detach(), None)
    return x + (extension.fsdp_post_all_gather(outputs, None, x.dtype)[0] - x.detach())


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)])
@distributed(world_size=(1, 2, 4), backends=TORCH)
def test_int8_rows_train_within_the_error_of_quantisation_at_a_quarter_of_the_bytes(
    world: World, policy: MixedPrecisionPolicy | None
) -> None:
    model, exact, quantised = make(world), make(world), make(world)
    for layer in (model[0], model[2]):
        layer.weight._hp_fsdp_extension = Int8Rows()  # type: ignore[assignment]
        fully_shard(layer, make_mesh(world), mp_policy=policy)
    fully_shard(model, make_mesh(world), mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, exact, quantised)]
    batches = [torch.randn(8, 32, device=world.device).mul(0.5) for _ in range(world.size)]
    for _ in range(5):
        loss = model(batches[world.rank]).square().mean()
        loss.backward()
        plain, through = [], []
        for x in batches:
            plain.append(exact(x).square().mean())
            weights = {n: straight_through(p) if p.ndim == 2 else p for n, p in quantised.named_parameters()}
            through.append(torch.func.functional_call(quantised, weights, x).square().mean())
        torch.stack(plain).mean().backward()
        torch.stack(through).mean().backward()
        # Rows have the same scales in pieces as in the whole: what differs is the order of float32 sums.
        torch.testing.assert_close(loss, through[world.rank], rtol=1e-5, atol=1e-6)
        # Half a step of 1/127 of the largest number of its row, for every weight.
        torch.testing.assert_close(loss, plain[world.rank], rtol=0.02, atol=0.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with count_collectives() as counted, torch.no_grad():
        model(batches[0])
    if world.size > 1:
        padded = [-(-rows // world.size) * world.size for rows in (31, 32)]
        weights = padded[0] * (32 + 4) + padded[1] * (
            31 + 4
        )  # a byte for each number, a float32 for each row
        assert counted.nbytes("all_gather") == weights + 4 * sum(padded)  # and the biases
        counted.assert_counts(all_gather=6)


@distributed(world_size=4, backends=TORCH)
def test_quantised_weights_are_kept_among_fewer_ranks_and_accumulate(world: World) -> None:
    found = []
    for options in ({}, {"reshard_after_forward": 2}, {"reshard_after_forward": False}):
        model = make(world)
        for layer in (model[0], model[2]):
            layer.weight._hp_fsdp_extension = Int8Rows()  # type: ignore[assignment]
            fully_shard(layer, make_mesh(world, replicas=1 if options else 2), **options)
        fully_shard(model, make_mesh(world, replicas=1 if options else 2))
        for batch in range(3):
            x = torch.full((2, 32), (world.rank + batch) / 8, device=world.device)
            model.set_requires_gradient_sync(batch == 2)
            model(x).square().mean().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=1e-5, atol=1e-7)  # sums in another order


class Fp8(torch.Tensor):
    """A float32 weight that is gathered in float8_e4m3 with one scale for all ranks: its largest number is agreed before."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Fp8:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_of = data

    def __repr__(self, **_: Any) -> str:
        return f"Fp8({self.data_of})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _pytree.tree_map_only(Fp8, lambda x: x.data_of, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func in _KEEPING:
            return _pytree.tree_map_only(torch.Tensor, Fp8, result)
        return args[0] if func in _WRITING else result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        largest = collectives.all_reduce(self.data_of.abs().max(), mesh.get_group(), "max")
        scale = 448.0 / largest
        # gloo takes no float8: its bytes travel.
        return ((self.data_of * scale).to(torch.float8_e4m3fn).view(torch.uint8),), scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: torch.Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            out.scale.copy_(metadata)
            return None
        whole = Fp8Whole(outputs[0], metadata.clone(), dtype)
        return whole, (outputs[0],)


aten = torch.ops.aten
_KEEPING = {
    aten.detach.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.alias.default,
}
_WRITING = {aten.add_.Tensor, aten.copy_.default, aten.mul_.Tensor, aten.zero_.default}


class Fp8Whole(torch.Tensor):
    """The whole weight, eight bits wide until somebody computes with it."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Fp8Whole:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self, **_: Any) -> str:
        return f"Fp8Whole({tuple(self.codes.shape)})"

    def values(self) -> torch.Tensor:
        return self.codes.view(torch.float8_e4m3fn).to(self.dtype) / self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            x = args[0]
            return Fp8Whole(x.codes, x.scale, x.dtype)
        plain = _pytree.tree_map_only(Fp8Whole, lambda x: x.values(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = 448.0 / x.detach().abs().max()
    return x + ((x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x.detach())


@distributed(world_size=(1, 2, 4), backends=TORCH)
def test_a_tensor_subclass_with_the_hooks_is_gathered_in_eight_bits_and_stays_so(world: World) -> None:
    model, quantised = make(world), make(world)
    for layer in (model[0], model[2]):
        layer.weight = torch.nn.Parameter(Fp8(layer.weight.detach()))  # type: ignore[assignment]
        fully_shard(layer, make_mesh(world))
    fully_shard(model, make_mesh(world))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, foreach=False) for each in (model, quantised)]
    batches = [torch.randn(8, 32, device=world.device).mul(0.5) for _ in range(world.size)]
    for _ in range(3):
        loss = model(batches[world.rank]).square().mean()
        loss.backward()
        through = []
        for x in batches:
            weights = {n: rounded(p) if p.ndim == 2 else p for n, p in quantised.named_parameters()}
            through.append(torch.func.functional_call(quantised, weights, x).square().mean())
        torch.stack(through).mean().backward()
        torch.testing.assert_close(loss, through[world.rank], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with count_collectives() as counted, torch.no_grad():
        model(batches[0])
    if world.size > 1:
        padded = [-(-rows // world.size) * world.size for rows in (31, 32)]
        # The unit of a layer gathers the codes and the bias; the extension itself reduces one number for each weight.
        counted.assert_counts(all_gather=4, all_reduce=2)
        assert counted.nbytes("all_gather") == padded[0] * 32 + padded[1] * 31 + 4 * sum(padded)
    for unit in units_in(world.platform, model):
        for param in unit.params:
            if param.is_extended:
                assert isinstance(param.full, Fp8Whole)
                assert isinstance(param.shard, Fp8)
                assert param.full.codes.untyped_storage().nbytes() == 0
