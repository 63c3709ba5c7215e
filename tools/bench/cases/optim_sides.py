"""On a rank: the optimizers of `optim`, each with the matrices of a decoder's blocks and gradients that do not change.

Ours: parameters of a model sharded by fully_shard. torch's Muon: the whole float32 matrices, on every rank. AdamW: as many
float32 elements as a rank's shards have. All begin with the same values, and have the same gradients.
"""

from __future__ import annotations

import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.cases import fsdp_settings, fsdp_training
from bench.cases.fsdp_training import device, initialize
from bench.cases.optim_settings import COEFFICIENTS, DECAY, MOMENTUM, RATE, STEPS, Setting, Side

# Apart from the seeds of the values.
FIRST_SEED_OF_GRADIENTS = 10**7
BATCHES = (1, 2, 4, 8, 16)

Named = list[tuple[str, Any]]


class Optimized:
    """An optimizer and what it has."""

    def __init__(self, side: Side, setting: Setting) -> None:
        """Not for the limit, which has no optimizer."""
        empty_cache()
        self.named = {Side.OURS: sharded, Side.PEER: whole, Side.ADAMW: like_shards}[side](setting)
        self._optimizer = optimizer(side, self.named)
        empty_cache()

    def step(self) -> None:
        """One step."""
        self._optimizer.step()


def optimizer(side: Side, named: Named) -> Any:
    """With the same hyperparameters."""
    import torch

    parameters = [parameter for _, parameter in named]
    if side is Side.ADAMW:
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    if side is Side.PEER:
        # By its module: torch's stubs of some versions do not name it.
        peer: Any = importlib.import_module("torch.optim").Muon
        return peer(
            parameters,
            lr=RATE,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            ns_coefficients=COEFFICIENTS,
            ns_steps=STEPS,
            adjust_lr_fn="match_rms_adamw",
        )
    muon: Any = importlib.import_module("hp_optim").Muon
    return muon(
        parameters,
        lr=RATE,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ns_coefficients=COEFFICIENTS,
        ns_steps=STEPS,
        scale="match_rms_adamw",
        ns_dtype="bfloat16",
    )


def sharded(setting: Setting) -> Named:
    """The matrices of the blocks of a model sharded by fully_shard, with their shards of the gradients."""
    distribute: Any = importlib.import_module("hp_dtensor").distribute_tensor
    like = fsdp_settings.Setting(setting.model, setting.sizes, batch=1, replicas=setting.replicas)
    named = matrices(fsdp_training.model_of(fsdp_training.Side.OURS, like))
    for (_, parameter), gradient in zip(named, gradients([p for _, p in named]), strict=True):
        parameter.grad = distribute(gradient, parameter.device_mesh, parameter.placements)
    return named


def whole(setting: Setting) -> Named:
    """The same, not sharded, in float32."""
    import torch

    from bench.models.llama import Llama

    with torch.device("meta"):
        model = Llama(setting.sizes)
    seeds = iter(range(10**6))
    for block in model.blocks:
        initialize(torch, block, seeds)
    named = matrices(model)
    for (_, parameter), gradient in zip(named, gradients([p for _, p in named]), strict=True):
        parameter.grad = gradient
    return named


def like_shards(setting: Setting) -> Named:
    """Float32 tensors as large as a rank's shards of the matrices."""
    import torch

    num_shards = torch.distributed.get_world_size() // setting.replicas
    found = []
    for name, shape in shapes_of(setting):
        piece = torch.zeros(-(-shape[0] // num_shards), shape[1], device=device(), requires_grad=True)
        piece.grad = torch.randn_like(piece)
        found.append((name, piece))
    return found


def matrices(model: Any) -> Named:
    """What Muon is for: neither embedding nor head, nor norms."""
    return [(name, p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]


def shapes_of(setting: Setting) -> list[tuple[str, tuple[int, int]]]:
    """Of the matrices."""
    import torch

    from bench.models.llama import Llama

    with torch.device("meta"):
        return [(name, tuple(p.shape)) for name, p in matrices(Llama(setting.sizes))]


def gradients(parameters: Sequence[Any]) -> Iterator[Any]:
    """Whole ones, equal on every rank and side."""
    import torch

    for seed, parameter in enumerate(parameters, FIRST_SEED_OF_GRADIENTS):
        generator = torch.Generator(device()).manual_seed(seed)
        yield torch.randn(tuple(parameter.shape), device=device(), generator=generator)


def limit_steps(shapes: Sequence[tuple[int, int]], side: Side) -> list[tuple[Callable[[], Any], float]]:
    """Newton-Schulz of a batch of each shape and size, and by how much its time counts: for all matrices, on all ranks.

    By torch's products, or (``Side.ITERATIONS``) as our Muon does it. Of each shape the sizes are alternatives; the fastest per matrix
    is the limit.
    """
    import torch

    found: list[tuple[Callable[[], Any], float]] = []
    for shape, count in Counter(shapes).items():
        for size in BATCHES:
            if size <= max(1, count):
                batch = torch.randn(size, *shape, device=device(), dtype=torch.bfloat16)
                by = iterated_by_torch if side is Side.LIMIT else iterated_by_us
                found.append((partial(by, batch), count / size))
    return found


def iterated_by_us(x: Any) -> Any:
    """Newton-Schulz of our Muon, in bfloat16."""
    newton_schulz: Any = importlib.import_module("hp_optim.muon.newton_schulz").newton_schulz
    return newton_schulz(x, coefficients=COEFFICIENTS, steps=STEPS, dtype="bfloat16")


def iterated_by_torch(x: Any) -> Any:
    """The same by torch's products of batches, the fastest that it has. All but the products is ours: norm and quotient."""
    import torch

    module: Any = importlib.import_module("hp_optim.muon.newton_schulz")
    platform: Any = importlib.import_module("hp_platform").get_platform()
    norm = torch.linalg.vector_norm(x, 2, (1, 2), keepdim=True, dtype=torch.float32)
    x = platform.quotient(x, norm + module.EPSILON, "bfloat16")
    a, b, c = COEFFICIENTS
    is_wide = x.shape[1] <= x.shape[2]
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT) if is_wide else torch.bmm(x.mT, x)
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a) if is_wide else torch.baddbmm(x, x, inner, beta=a)
    return x


def empty_cache() -> None:
    """Give back what the side before has left."""
    import torch

    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
