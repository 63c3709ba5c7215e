"""Low-rank adapters on a frozen, sharded base: every adapter trains as in one process, and is saved whole."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_fsdp import StateDictOptions, get_model_state_dict, set_model_state_dict
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, gradients, loss_of, make_mesh, meshes, parameters, shard

VOCABULARY, WIDTH, HIDDEN, RANK = 11, 12, 40, 2
"""The adapter's rank is below the number of processes: some hold no row of its first matrix."""


class AdaptedLinear(torch.nn.Module):
    """``x @ W.T + b + x @ A.T @ B.T`` with ``W (rows, columns)`` and ``b`` frozen, ``A (rank, columns)``, ``B (rows, rank)``."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(columns, rows).requires_grad_(False)
        self.lora_A = torch.nn.ParameterDict()
        self.lora_B = torch.nn.ParameterDict()
        self.active = "first"
        self.add("first")

    def add(self, name: str) -> None:
        rows, columns = self.base.weight.shape
        self.lora_A[name] = torch.nn.Parameter(torch.randn(RANK, columns) / columns**0.5)
        self.lora_B[name] = torch.nn.Parameter(torch.randn(rows, RANK) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        A, B = self.lora_A[self.active], self.lora_B[self.active]
        return self.base(x) + (x.to(A.dtype) @ A.T @ B.T).to(x.dtype)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH).requires_grad_(False)
        self.inner = AdaptedLinear(WIDTH, HIDDEN)
        self.outer = AdaptedLinear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


class AdaptedModel(torch.nn.Module):
    """Nothing before the first adapter asks for a gradient, and nothing after the last one does."""

    def __init__(self, *, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].outer.add("second")  # nobody uses it
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)
        self.reentrant = recompute
        """Which kind of checkpoint goes around blocks; None: no one."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.reentrant:
            x.requires_grad_()  # as reentrant checkpoints want it
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def build(world: World, **kwargs: Any) -> AdaptedModel:
    torch.manual_seed(3)
    return AdaptedModel(**kwargs).double().to(world.device)


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in adapters(model)], 1e-2)


def check_steps(world: World, reference: Any, model: Any, first: int = 0, **limits: float) -> None:
    """Gradients of three steps and the parameters after them."""
    models = (reference, model)
    optimizers = [optimizer_of(each) for each in models]
    for step in range(first, first + 3):
        for each, samples in zip(models, batch(world, step), strict=True):
            loss_of(each, samples).backward()
        assert_parity(gradients(model), gradients(reference), **limits, name=f"gradients of step {step}")
        for name, parameter in adapters(model):
            assert (parameter.grad is None) == ("second" in name), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(parameters(model), parameters(reference), **limits, name="parameters")


@pytest.mark.parametrize("recompute", [None, False, True], ids=["", "recompute", "recompute, reentrant"])
@distributed(world_size=(1, 2, 3, 4), backends=TORCH)
def test_adapters_train_as_in_one_process_and_the_base_stays(world: World, recompute: bool | None) -> None:
    for mesh in meshes(world):
        for reshard in (True, False):
            reference, model = (
                build(world),
                shard(build(world, recompute=recompute), mesh, reshard_after_forward=reshard),
            )
            check_steps(world, reference, model, **CLOSE)


@distributed(world_size=(2, 4), backends=TORCH)
def test_frozen_parameters_are_never_reduced(world: World) -> None:
    model = shard(build(world), make_mesh(world))
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad) * 8
    for step in range(2):
        with count_collectives() as counted:
            loss_of(model, batch(world, step)[1]).backward()
        assert counted.counts["reduce_scatter"] == 2, "one per block; the root has no adapter"
        # Rows of adapters are padded to the number of ranks, and still less than what is frozen.
        assert counted.nbytes("reduce_scatter") < frozen


@distributed(world_size=(2, 3), backends=TORCH)
def test_the_whole_adapter_is_saved_and_fits_a_model_that_is_not_sharded(world: World) -> None:
    model = shard(build(world), make_mesh(world))
    optimizer = optimizer_of(model)
    loss_of(model, batch(world, 0)[1]).backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    assert list(state) == [name for name, _ in adapters(build(world))]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = build(world)
    with torch.no_grad():
        for _, parameter in adapters(fresh):
            parameter.zero_()
    found = fresh.load_state_dict(torch.load(file, weights_only=True), strict=False)
    assert not found.unexpected_keys
    ids, _ = batch(world, 1)
    assert_parity(model(ids), fresh(ids), **CLOSE)


@distributed(world_size=(2, 3), backends=TORCH)
def test_a_saved_adapter_is_read_into_a_sharded_model(world: World) -> None:
    trained = build(world)
    with torch.no_grad():
        for _, parameter in adapters(trained):
            parameter.mul_(1.5)
    state = {name: parameter.detach() for name, parameter in adapters(trained)}
    model = shard(build(world), make_mesh(world))
    set_model_state_dict(model, state, options=StateDictOptions(ignore_frozen_params=True))
    ids, _ = batch(world, 1)
    assert_parity(model(ids), trained(ids), **CLOSE)


@distributed(world_size=(2, 3), backends=TORCH)
def test_another_adapter_and_parts_of_the_base_may_train_later(world: World) -> None:
    reference, model = build(world), shard(build(world), make_mesh(world))
    check_steps(world, reference, model, **CLOSE)
    for each in (reference, model):
        each.blocks[1].outer.active = "second"
        each.blocks[0].norm.requires_grad_(True)
        for name, parameter in adapters(each):
            parameter.requires_grad_("blocks.0.inner" not in name)
    for step in (3, 4):
        for each, samples in zip((reference, model), batch(world, step), strict=True):
            loss_of(each, samples).backward()
    assert_parity(gradients(model), gradients(reference), **CLOSE)
    assert model.blocks[0].norm.weight.grad is not None
    assert model.blocks[0].inner.lora_A["first"].grad is None
    assert model.blocks[1].outer.lora_B["second"].grad is not None


@distributed(world_size=(2, 3), backends=TORCH)
def test_adapters_in_another_dtype_than_the_base_share_its_units(world: World) -> None:
    def mixed() -> AdaptedModel:
        model = build(world).float()
        for module in model.modules():
            if isinstance(module, AdaptedLinear):
                module.lora_A.double()
                module.lora_B.double()
        return model

    # The base computes in float32, values are near 1.
    check_steps(world, mixed(), shard(mixed(), make_mesh(world)), rtol=0.0, atol=1e-5)
