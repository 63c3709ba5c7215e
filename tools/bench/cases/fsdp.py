"""One training step of a sharded decoder: ours beside FSDP2, and beside what one GPU needs for the computation alone.

Same model, options, seed and data on both sides: the losses of the first steps are compared, and a side that computes
something else is refused. bfloat16 computation, float32 reduction, fused AdamW, fresh tokens each step, norm weights 1. The
limit is forward and backward on one GPU with bfloat16 weights in place, and AdamW on as many elements as a shard has.
Without GPUs: a tiny model on two processes, in float32.
"""

from __future__ import annotations

import functools
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.case import Better, Case, Sample
from bench.machine import num_gpus_used
from bench.ranks import device_type, measured_on_ranks

WARM_STEPS, STEPS = 5, 12
COMPARED_STEPS = 3
# Of the losses, relative: bfloat16 rounds products that are summed in another order.
TOLERANCE = {"cuda": 2e-3, "cpu": 1e-5}
Step = Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    size: str
    batch: int
    """Sequences per GPU."""
    recompute: bool = False
    """Activations of blocks are computed again in backward."""
    replicas: int = 1
    """Of the sharded model, each on its part of the GPUs."""


def measure(side: str, setting: Setting) -> Sample:
    """On a rank: milliseconds of a step, the median of twelve, and peak memory."""
    if side != "limit":
        check_same_losses(setting)
    torch = importlib.import_module("torch")
    with training(side, setting) as step:
        for _ in range(WARM_STEPS):
            step()
        _wait(torch)
        torch.distributed.barrier()
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = _timed(torch, step)
        peak = torch.cuda.max_memory_allocated() if device() == "cuda" else None
    return Sample(statistics.median(times), peak)


def _timed(torch: Any, step: Step) -> list[float]:
    if device() == "cpu":
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    # Events, since a step ends on the host before it does on the GPU: the host may run ahead, as in training.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in zip(marks, marks[1:], strict=False)]


@functools.cache
def check_same_losses(setting: Setting) -> None:
    """On a rank, once: RuntimeError unless both sides have the same losses."""
    found = {}
    for side in ("ours", "peer"):
        with training(side, setting) as step:
            found[side] = [float(step()) for _ in range(COMPARED_STEPS)]
    bound = TOLERANCE[device()]
    for ours, peer in zip(found["ours"], found["peer"], strict=True):
        if not abs(ours - peer) <= bound * abs(peer):
            raise RuntimeError(
                f"the two sides do not compute the same: losses {found}, at most {bound} apart is rounding"
            )


@contextmanager
def training(side: str, setting: Setting) -> Iterator[Step]:
    """A side's model, built; what is given runs one step and returns its loss. Freed in the end."""
    torch = importlib.import_module("torch")
    step = _built(torch, side, setting)
    _wait(torch)
    try:
        yield step
    finally:
        del step
        gc.collect()
        if device() == "cuda":
            torch.cuda.empty_cache()


def _built(torch: Any, side: str, setting: Setting) -> Step:
    from bench.models.llama import SIZES, Llama
    from torch.utils.checkpoint import checkpoint

    sizes = SIZES[setting.size if device() == "cuda" else "tiny"]
    half = torch.bfloat16 if device() == "cuda" else torch.float32
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with torch.device("meta"):
        model = Llama(sizes)
    for block in model.blocks:
        if setting.recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if side == "limit":
        model = model.to(half).to_empty(device=device())
        share = [
            torch.zeros(-(-p.numel() * setting.replicas // world), device=device())
            for p in model.parameters()
        ]
        for x in share:
            x.requires_grad_(True)
            x.grad = torch.zeros_like(x)
        optimized = share
    else:
        _sharded(torch, side, setting, model, half)
        optimized = list(model.parameters())
    _initialize(torch, model)
    optimizer = torch.optim.AdamW(optimized, lr=1e-4, fused=True)
    tokens = torch.Generator(device()).manual_seed(1 + rank)

    def step() -> Any:
        ids = torch.randint(
            sizes.vocabulary, (setting.batch, sizes.length + 1), device=device(), generator=tokens
        )
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if side == "limit":
            model.zero_grad()
        else:
            optimizer.zero_grad()
        return loss.detach()

    return step


def _sharded(torch: Any, side: str, setting: Setting, model: Any, half: Any) -> None:
    fsdp: Any = importlib.import_module("hp_fsdp" if side == "ours" else "torch.distributed.fsdp")
    meshes: Any = importlib.import_module(
        "hp_platform" if side == "ours" else "torch.distributed.device_mesh"
    )
    world = torch.distributed.get_world_size()
    shape = (world,) if setting.replicas == 1 else (setting.replicas, world // setting.replicas)
    names = ("shard",) if setting.replicas == 1 else ("replicate", "shard")
    mesh = meshes.init_device_mesh(device(), shape, mesh_dim_names=names)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device())


def _initialize(torch: Any, model: Any) -> None:
    """The same values on both sides: every parameter is drawn whole, and each rank keeps its rows."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(device()).manual_seed(i)
            whole = torch.empty(parameter.shape, device=device()).normal_(0.0, 0.02, generator=generator)
            if hasattr(parameter, "to_local"):
                rows = parameter.to_local()
                # The mesh's last dim shards dim 0.
                mesh = parameter.device_mesh
                count, index = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
                rows.copy_(torch.chunk(whole, count)[index])
            else:
                parameter.copy_(whole)


def device() -> str:
    """Where this world runs."""
    torch = importlib.import_module("torch")
    return device_type(torch.distributed.get_world_size())


def _wait(torch: Any) -> None:
    if device() == "cuda":
        torch.cuda.synchronize()
