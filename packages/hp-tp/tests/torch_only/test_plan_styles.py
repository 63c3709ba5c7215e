"""The styles that plans need besides cutting layers: mixtures of experts, layers without their model, and wrong uses of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hp_dtensor import DTensor, Shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import (
    PrepareAttention,
    PrepareHidden,
    PrepareModel,
    Replicated,
    StackedExperts,
    describe,
    parallelize_module,
    plan_for,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from tp_models import make_mesh

TORCH = ("torch", "cuda")
CLOSE = {"rtol": 0.0, "atol": 1e-12}
"""float64, numbers near 1, sums of some ten products."""
WIDTH, EXPERTS, HEADS = 8, 3, 6


class FeedForward(torch.nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(WIDTH, inner, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Stacked(torch.nn.Module):
    """The same experts in one module."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (torch.nn.Parameter(torch.randn(EXPERTS, inner, WIDTH)) for _ in range(2))
        self.w2 = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, inner))

    def forward(self, x: Any, weights: Any) -> Any:
        inner = functional.silu(torch.einsum("nh,eih->nei", x, self.w1)) * torch.einsum(
            "nh,eih->nei", x, self.w3
        )
        return torch.einsum("nei,ehi,ne->nh", inner, self.w2, weights)


class Mixture(torch.nn.Module):
    def __init__(self, inner: int, is_stacked: bool) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts: Any = (
            Stacked(inner) if is_stacked else torch.nn.ModuleList(FeedForward(inner) for _ in range(EXPERTS))
        )

    def forward(self, hidden: Any) -> Any:
        x = hidden.reshape(-1, hidden.shape[-1])
        weights = self.router(x).softmax(-1)
        if isinstance(self.experts, Stacked):
            return self.experts(x, weights).view(hidden.shape)
        mixed = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        for i, expert in enumerate(self.experts):
            chosen = (weights[:, i] > 0.3).nonzero()[:, 0]
            mixed.index_add_(0, chosen, expert(x[chosen]) * weights[chosen, i, None])
        return mixed.view(hidden.shape)


class Layer(torch.nn.Module):
    def __init__(self, inner: int, is_stacked: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mixture = Mixture(inner, is_stacked)

    def forward(self, hidden: Any) -> Any:
        return hidden + self.mixture(self.norm(hidden))


@pytest.mark.parametrize("stacked", [True, False])
@distributed(world_size=(1, 2, 3), backends=TORCH)
def test_a_layer_with_experts_is_that_of_one_process(world: World, stacked: bool) -> None:
    """An inner size that does not divide, and one below the number of ranks; the layer alone, whole plain tensors in and out."""
    for inner in (5, 1):
        for sequence in (True, False):
            torch.manual_seed(1)
            reference = Layer(inner, stacked).double().to(world.device)
            torch.manual_seed(1)
            model = Layer(inner, stacked).double().to(world.device)
            plan = plan_for(model, sequence_parallel=sequence)
            assert plan.replicated == {}
            parallelize_module(model, make_mesh(world), plan)
            xs = [
                torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
                for _ in "ab"
            ]
            xs = [x.to(world.device).requires_grad_() for x in xs]
            expected, found = reference(xs[0]), model(xs[1])
            assert not isinstance(found, DTensor)
            for y in (expected, found):
                (y * y).mean().backward()
            assert_parity(found.detach(), expected.detach(), **CLOSE, name="result")
            assert_parity(xs[1].grad, xs[0].grad, **CLOSE, name="gradient of the input")
            assert_parity(
                {name: p.grad.full_tensor() for name, p in model.named_parameters()},
                {name: p.grad for name, p in reference.named_parameters()},
                **CLOSE,
                name="gradients",
            )


@distributed(world_size=2, backends=TORCH)
def test_describe_tells_what_experts_send(world: World) -> None:
    model = Layer(4, True).to(world.device)
    parallelize_module(model, make_mesh(world), plan_for(model))
    told = [
        line.split(maxsplit=1) for line in str(describe(model)).splitlines() if line.startswith("mixture")
    ]
    sent = dict(reversed(told))  # the first row of a module has it
    assert (
        "backward: all_reduce of the gradient of tokens, all_reduce of the gradient of routes"
        in (sent["mixture.experts"])
    )
    assert (
        "forward: all_gather of an input that is cut, reduce_scatter of a result that is a sum"
        in sent["mixture"]
    )
    hidden = torch.randn(2, 4, WIDTH, device=world.device, requires_grad=True)
    with count_collectives() as counted:
        result = model(hidden)
    counted.assert_counts(all_gather=2, reduce_scatter=1)  # one gather is that of the whole result
    with count_collectives() as counted:
        result.sum().backward()
    counted.assert_counts(all_gather=2, all_reduce=4)  # tokens, routes, weight and bias of the norm


@distributed(world_size=2, backends=TORCH)
def test_wrong_uses_are_refused(world: World) -> None:
    mesh = make_mesh(world)
    with pytest.raises(
        ValueError, match=r"this Linear has 'weight' of shape \(3, 8\): cut it by a style of its own"
    ):
        StackedExperts().apply(torch.nn.Linear(WIDTH, EXPERTS), mesh)
    odd = torch.nn.Module()
    odd.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 3, WIDTH))
    with pytest.raises(ValueError, match=r"this Module has 'gate_up_proj' of shape \(2, 3, 8\)"):
        StackedExperts().apply(odd, mesh)
    with pytest.raises(ValueError, match="StackedExperts cuts parameters, but this SiLU has none"):
        StackedExperts().apply(torch.nn.SiLU(), mesh)
    stacked = Stacked(4).to(world.device)
    StackedExperts().apply(stacked, mesh)
    with pytest.raises(ValueError, match="parameter 'w1' of this Stacked is a DTensor of .* already"):
        StackedExperts().apply(stacked, mesh)
    with pytest.raises(ValueError, match="forward of Layer has no argument 'embeds'; it has hidden"):
        PrepareHidden(arguments=("embeds",), layouts=Shard(1)).apply(Layer(4, True), mesh)
    with pytest.raises(
        ValueError, match="PrepareAttention: 3 heads of this Identity do not divide over 2 ranks"
    ):
        PrepareAttention(heads=3, kv_heads=3).apply(torch.nn.Identity(), mesh)
    with pytest.raises(ValueError, match="Replicated: use_local_output must be True or False, got None"):
        Replicated(use_local_output=None)  # type: ignore[arg-type]
    square = init_device_mesh(world.device_type, (1, 2), mesh_dim_names=("dp", "tp"))
    for style in (StackedExperts(), Replicated(), PrepareModel(), PrepareHidden(layouts=Shard(1))):
        with pytest.raises(ValueError, match=f"{type(style).__name__} takes a mesh of one dim"):
            style.apply(torch.nn.Linear(2, 2), square)
