"""A Llama-8B-sized layer, sharded over all GPUs by hand in both libraries: tensor parallel with a sharded sequence, eager.

Weights of the projections are cut by heads and by hidden units, the norms run on pieces of the sequence, which are gathered
in front of the projections and summed and cut behind them. On a machine without GPUs: a small layer on two processes.
Before anything is measured, losses and gradients of both libraries are compared: a peer that computes something else is none.
"""

import statistics
import time
from contextlib import nullcontext
from functools import cache
from typing import Any

from bench.case import Better, Case, Sample
from bench.cases.dtensor import Kind
from bench.machine import num_gpus
from bench.ranks import device_type, measured_on_ranks

NUM_STEPS = 20
NUM_REPEATS = 5
# Model, heads, heads of keys and values, hidden units.
LLAMA_8B = (4096, 32, 8, 14336)
SMALL = (64, 4, 2, 128)


# How far the two may lie apart, relative to the norm: they round in different places.
TOLERANCE = {"cuda": 5e-2, "cpu": 1e-5}


def measure_layer(name: str, length: int) -> Sample:
    """On a rank: one forward and backward of the layer, in milliseconds; the median of five repetitions, and peak memory."""
    check_same_results(length)
    layer = Layer(name, length)
    torch, device = layer.kind.torch, layer.device
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        layer.step()
    wait()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(NUM_REPEATS):
        torch.distributed.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            layer.step()
        wait()
        times.append((time.perf_counter() - start) / NUM_STEPS * 1e3)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Sample(statistics.median(times), peak)


@cache
def check_same_results(length: int) -> None:
    """On a rank, once: RuntimeError unless losses and all gradients of both libraries agree."""
    ours, peer = (Layer(name, length).results() for name in ("ours", "torch"))
    for name, expected in peer.items():
        found, expected = ours[name].double(), expected.double()
        apart = ((found - expected).norm() / expected.norm()).item()
        bound = TOLERANCE[expected.device.type]
        if not apart <= bound:  # not for nan either
            raise RuntimeError(
                f"the two sides do not compute the same: {name} differs by {apart:.2e} of its norm, at most {bound:.0e} is "
                f"rounding; a ratio of their times would mean nothing"
            )


class Layer:
    """The layer's tensors in one of the libraries; the same values in both."""

    def __init__(self, name: str, length: int) -> None:
        self.kind = kind = Kind(name)
        torch = kind.torch
        num_ranks = torch.distributed.get_world_size()
        self.device = device = device_type(num_ranks)
        on_gpu = device == "cuda"
        self.length = length if on_gpu else 16
        self.sizes = model, num_heads, num_groups, hidden = LLAMA_8B if on_gpu else SMALL
        head, mesh = model // num_heads, kind.mesh(device, num_ranks)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        torch.manual_seed(0)

        def placed(placement: Any, *shape: int) -> Any:
            x = torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5
            return kind.distribute(x, mesh, [placement]).requires_grad_()

        rows, columns = kind.shard(0), kind.shard(1)
        self.weights = {
            "q": placed(rows, model, model),
            "k": placed(rows, num_groups * head, model),
            "v": placed(rows, num_groups * head, model),
            "o": placed(columns, model, model),
            "gate": placed(rows, hidden, model),
            "up": placed(rows, hidden, model),
            "down": placed(columns, model, hidden),
            "first norm": placed(kind.replicate, model),
            "second norm": placed(kind.replicate, model),
        }
        self.x = placed(kind.shard(1), 1, self.length, model)
        angles = torch.arange(self.length, device=device)[:, None] / 1e4 ** (
            torch.arange(head // 2, device=device) * 2 / head
        )
        self.turn = [
            kind.distribute(f(angles).to(dtype)[:, None], mesh, [kind.replicate])
            for f in (torch.cos, torch.sin)
        ]

    def backward(self) -> Any:
        """Forward and backward; the loss."""
        attention, on_gpu = self.kind.torch.nn.attention, self.device == "cuda"
        # torch's own has no rule for the fused attention of CPUs, and none for a causal mask there.
        with nullcontext() if on_gpu else attention.sdpa_kernel(attention.SDPBackend.MATH):
            model, num_heads, num_groups, _ = self.sizes
            heads = num_heads, num_groups, model // num_heads
            y = _layer(self.kind, self.x, self.weights, self.turn, heads, is_causal=on_gpu)
        loss = y.float().square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        """Forward and backward, and what an optimizer would do last."""
        self.backward()
        self.x.grad = None
        for weight in self.weights.values():
            weight.grad = None

    def results(self) -> dict[str, Any]:
        """Loss and gradients, whole and plain."""
        found = {"the loss": self.backward().detach()}
        found |= {f"the gradient of {name}": w.grad for name, w in [*self.weights.items(), ("x", self.x)]}
        return {name: x.full_tensor() for name, x in found.items()}


def _layer(
    kind: Kind,
    x: Any,
    weights: dict[str, Any],
    turn: list[Any],
    heads: tuple[int, int, int],
    *,
    is_causal: bool,
) -> Any:
    functional = kind.torch.nn.functional
    num_heads, num_groups, head = heads
    batch, length, model = x.shape
    sequence = [kind.shard(1)]

    def rotated(y: Any) -> Any:
        # Dims from the front: torch's own up to 2.11 places a stack (the backward of unbind) along a negative dim wrongly.
        first, second = y.unflatten(3, (2, head // 2)).unbind(3)
        cos, sin = turn
        return kind.torch.cat([first * cos - second * sin, second * cos + first * sin], 3)

    def projected(y: Any, name: str, count: int) -> Any:
        return functional.linear(y, weights[name]).view(batch, length, count, head)

    h = functional.rms_norm(x, (model,), weights["first norm"]).redistribute(placements=[kind.replicate])
    q, k = rotated(projected(h, "q", num_heads)), rotated(projected(h, "k", num_groups))
    v = projected(h, "v", num_groups)
    # Every head of keys and values as often as heads of queries share it.
    k, v = (y.repeat_interleave(num_heads // num_groups, 2) for y in (k, v))
    a = functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=is_causal)
    a = a.transpose(1, 2).reshape(batch, length, model)
    x = x + functional.linear(a, weights["o"]).redistribute(placements=sequence)
    h = functional.rms_norm(x, (model,), weights["second norm"]).redistribute(placements=[kind.replicate])
    gated = functional.silu(functional.linear(h, weights["gate"])) * functional.linear(h, weights["up"])
    return x + functional.linear(gated, weights["down"]).redistribute(placements=sequence)


def _num_ranks() -> int:
    """All GPUs of the machine, of which the layer can use 8; two processes where there are none."""
    return max(n for n in (2, 4, 8) if n <= max(num_gpus(), 2))


CASES = tuple(
    Case(
        name=f"dtensor-layer-{length}",
        summary=f"forward and backward of a Llama-8B-sized layer over all GPUs, {length} tokens, bfloat16, eager",
        ours=measured_on_ranks(_num_ranks(), measure_layer, "ours", length),
        peer=measured_on_ranks(_num_ranks(), measure_layer, "torch", length),
        peer_name="torch.distributed.tensor",
        unit="ms/step",
        better=Better.LOWER,
        goal=1 / 1.2,
    )
    for length in (512, 2048)
)
