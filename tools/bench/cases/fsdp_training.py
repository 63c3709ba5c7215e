"""On a rank: the training loop of one side of `fsdp`, built so that all sides begin with the same values.

bfloat16 computation, float32 reduction, torch's fused AdamW (or on our side hp-optim's), fresh random tokens each step, norm
weights 1.
The limit has no sharding and no communication: bfloat16 weights that are there already, forward, backward, and AdamW on as
many float32 elements as a shard has.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from bench.cases.fsdp_segments import BACKWARD, BEGIN, END, GRADIENTS, Marks
from bench.cases.fsdp_settings import Setting
from bench.ranks import device_type

Step = Callable[[], Any]
STD = 0.02
RATE = 1e-4


class Side(enum.Enum):
    """Whose training it is."""

    OURS = "ours"
    PEER = "FSDP2"
    LIMIT = "limit"


def training(side: Side, setting: Setting, marks: Marks | None = None) -> Step:
    """A side's model, built; what is given runs one step, which comes to ``marks``, and returns its loss.

    It is freed when the caller lets go of it, and the memory given back when the next one is built.
    """
    _empty_cache()
    step = _built(side, setting, marks)
    _empty_cache()  # of the values before sharding
    return step


def device() -> str:
    """Where this world runs."""
    import torch

    return device_type(torch.distributed.get_world_size())


def wait() -> None:
    """Until the GPU has done what it was told."""
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()


def _empty_cache() -> None:
    import torch

    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()


def _built(side: Side, setting: Setting, marks: Marks | None) -> Step:
    model = model_of(side, setting)
    mark = _unmarked
    if marks is not None:
        mark = marks.mark
        marks.watch(model.blocks)
    backward = _backward(model, setting, mark)
    optimized = list(model.parameters()) if side is not Side.LIMIT else _like_a_shard(model, setting)
    optimizer = _adamw(side, setting)(optimized, lr=RATE, fused=True)

    def step() -> Any:
        mark(BEGIN)
        loss = backward()
        mark(GRADIENTS)
        optimizer.step()
        # The limit keeps the gradients of its shard, which nothing computes, and drops those of the model.
        (model if side is Side.LIMIT else optimizer).zero_grad()
        mark(END)
        return loss

    return step


def _unmarked(name: str) -> None:
    """Nobody asks."""


def _adamw(side: Side, setting: Setting) -> Any:
    own = side is Side.OURS and setting.own_adamw
    return importlib.import_module("hp_optim" if own else "torch.optim").AdamW


def backward_of(side: Side, setting: Setting) -> Step:
    """Forward and backward alone; gradients are dropped."""
    model = model_of(side, setting)
    backward, parameters = _backward(model, setting, _unmarked), list(model.parameters())

    def step() -> Any:
        loss = backward()
        for parameter in parameters:  # as optimizers do it
            parameter.grad = None
        return loss

    return step


def _backward(model: Any, setting: Setting, mark: Callable[[str], None]) -> Step:
    """Forward and backward on fresh tokens, other ones on every rank; the loss."""
    import torch

    tokens = torch.Generator(device()).manual_seed(1 + torch.distributed.get_rank())
    shape, vocabulary = (setting.batch, setting.sizes.length + 1), setting.sizes.vocabulary

    def backward() -> Any:
        ids = torch.randint(vocabulary, shape, device=device(), generator=tokens)
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        mark(BACKWARD)
        loss.backward()
        return loss.detach()

    return backward


def model_of(side: Side, setting: Setting) -> Any:
    """Block by block: initialised as a whole, then sharded, so that no more than a block is ever there whole."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from bench.models.llama import Llama

    with torch.device("meta"):
        model = Llama(setting.sizes)
    seeds = iter(range(10**6))
    shard = _sharded(side, setting)
    for block in model.blocks:
        if setting.recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        initialize(torch, block, seeds)
        shard(block)
    for rest in (model.embedding, model.norm, model.head):
        initialize(torch, rest, seeds)
    shard(model)
    return model


def initialize(torch: Any, module: Any, seeds: Iterator[int]) -> None:
    """Values of the parameters of a module on the meta device, from a seed for each."""
    module.to_empty(device=device())
    with torch.no_grad():
        for parameter in module.parameters():
            generator = torch.Generator(device()).manual_seed(next(seeds))
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, STD, generator=generator)


def _sharded(side: Side, setting: Setting) -> Callable[[Any], Any]:
    """What shards a module, the inner ones first."""
    import torch

    if side is Side.LIMIT:
        return lambda module: module.to(torch.bfloat16)
    ours = side is Side.OURS
    fsdp: Any = importlib.import_module("hp_fsdp" if ours else "torch.distributed.fsdp")
    meshes: Any = importlib.import_module("hp_platform" if ours else "torch.distributed.device_mesh")
    world = torch.distributed.get_world_size()
    if setting.replicas == 1:
        mesh = meshes.init_device_mesh(device(), (world,), mesh_dim_names=("shard",))
    else:
        shape = (setting.replicas, world // setting.replicas)
        mesh = meshes.init_device_mesh(device(), shape, mesh_dim_names=("replicate", "shard"))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return lambda module: fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)


def _like_a_shard(model: Any, setting: Setting) -> list[Any]:
    """Float32 parameters as large as a rank's pieces of the model's, with gradients."""
    import torch

    num_shards = torch.distributed.get_world_size() // setting.replicas
    found = []
    for parameter in model.parameters():
        piece = torch.zeros(-(-parameter.numel() // num_shards), device=device(), requires_grad=True)
        piece.grad = torch.zeros_like(piece)
        found.append(piece)
    return found
