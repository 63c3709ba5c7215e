"""A Llama-8B-sized layer, sharded over all GPUs by hand in both libraries: tensor parallel with a sharded sequence, eager.

Weights of the projections are cut by heads and by hidden units, the norms run on pieces of the sequence, which are gathered
in front of the projections and summed and cut behind them. On a machine without GPUs: a small layer on two processes.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from bench.case import Better, Case, Sample
from bench.cases.dtensor import Kind
from bench.ranks import device_type, measured_on_ranks

NUM_STEPS = 20
NUM_REPEATS = 5
# Model, heads, heads of keys and values, hidden units.
LLAMA_8B = (4096, 32, 8, 14336)
SMALL = (64, 4, 2, 128)


def measure_layer(name: str, length: int) -> Sample:
    """On a rank: one forward and backward of the layer, in milliseconds; the median of five repetitions, and peak memory."""
    kind = Kind(name)
    torch = kind.torch
    num_ranks = torch.distributed.get_world_size()
    device = device_type(num_ranks)
    sizes = LLAMA_8B if device == "cuda" else SMALL
    step = _step(kind, device, num_ranks, length if device == "cuda" else 16, sizes)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        step()
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(NUM_REPEATS):
        torch.distributed.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            step()
        wait()
        times.append((time.perf_counter() - start) / NUM_STEPS * 1e3)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Sample(statistics.median(times), peak)


def _step(
    kind: Kind, device: str, num_ranks: int, length: int, sizes: tuple[int, int, int, int]
) -> Callable[[], None]:
    torch = kind.torch
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, num_heads, num_groups, hidden = sizes
    head, mesh = model // num_heads, kind.mesh(device, num_ranks)
    torch.manual_seed(0)

    def placed(placement: Any, *shape: int, trained: bool = True) -> Any:
        x = torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5
        return kind.distribute(x, mesh, [placement]).requires_grad_(trained)

    rows, columns = kind.shard(0), kind.shard(1)
    weights = {
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
    x = placed(kind.shard(1), 1, length, model)
    angles = torch.arange(length, device=device)[:, None] / 1e4 ** (
        torch.arange(head // 2, device=device) * 2 / head
    )
    turn = [
        kind.distribute(f(angles).to(dtype)[:, None], mesh, [kind.replicate]) for f in (torch.cos, torch.sin)
    ]
    attention = torch.nn.attention

    def step() -> None:
        # torch's own has no rule for the fused attention of CPUs, and none for a causal mask there.
        with nullcontext() if device == "cuda" else attention.sdpa_kernel(attention.SDPBackend.MATH):
            y = _layer(kind, x, weights, turn, (num_heads, num_groups, head), is_causal=device == "cuda")
        y.float().square().mean().backward()
        x.grad = None
        for weight in weights.values():
            weight.grad = None

    return step


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
        first, second = y.unflatten(-1, (2, head // 2)).unbind(-2)
        cos, sin = turn
        return kind.torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def projected(y: Any, name: str, count: int) -> Any:
        return functional.linear(y, weights[name]).view(batch, length, count, head)

    h = functional.rms_norm(x, (model,), weights["first norm"]).redistribute(placements=[kind.replicate])
    q, k = rotated(projected(h, "q", num_heads)), rotated(projected(h, "k", num_groups))
    v = projected(h, "v", num_groups)
    # Every head of keys and values as often as heads of queries share it; a view until it is flattened.
    k, v = (y.unsqueeze(3).expand(-1, -1, -1, num_heads // num_groups, -1).flatten(2, 3) for y in (k, v))
    a = functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=is_causal)
    a = a.transpose(1, 2).reshape(batch, length, model)
    x = x + functional.linear(a, weights["o"]).redistribute(placements=sequence)
    h = functional.rms_norm(x, (model,), weights["second norm"]).redistribute(placements=[kind.replicate])
    gated = functional.silu(functional.linear(h, weights["gate"])) * functional.linear(h, weights["up"])
    return x + functional.linear(gated, weights["down"]).redistribute(placements=sequence)


def _num_ranks() -> int:
    """All GPUs of the machine, of which the layer can use 8; two processes where there are none."""
    import shutil
    import subprocess

    if shutil.which("nvidia-smi") is None:
        return 2
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return max(n for n in (2, 4, 8) if n <= max(count, 2))


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
