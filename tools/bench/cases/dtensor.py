"""What a sharded tensor adds to the framework's own call: ours beside torch.distributed.tensor, in the same processes.

Small tensors, so that the way to the kernel and not the kernel is measured; two ranks on gloo with one thread each.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.case import Better, Case, Sample
from bench.ranks import measured_on_ranks

NUM_RANKS = 2
NUM_CALLS = 300
# The fastest of fifteen repetitions, plain and sharded in turn: on a busy machine all others are longer by what was not ours.
NUM_REPEATS = 15

Call = Callable[[], object]
# One column: the plain call, then that on sharded tensors.
Pair = tuple[Call, Call]


class Kind:
    """One of the two libraries: how it makes tensors. Both have torch's own functions for everything else."""

    def __init__(self, name: str) -> None:
        import torch

        ours = name == "ours"
        library: Any = importlib.import_module("hp_dtensor" if ours else "torch.distributed.tensor")
        meshes: Any = importlib.import_module("hp_platform" if ours else "torch.distributed.tensor")
        self.torch, self.distribute = torch, library.distribute_tensor
        self.from_local: Any = library.DTensor.from_local
        self.shard, self.replicate, self.partial = library.Shard, library.Replicate(), library.Partial()
        self._init_device_mesh = meshes.init_device_mesh

    def mesh(self, device_type: str, num_ranks: int) -> Any:
        """A mesh of one dim over all ranks."""
        return self._init_device_mesh(device_type, (num_ranks,))


def _operations(kind: Kind, mesh: Any) -> dict[str, Callable[[], Pair]]:
    """Name -> what makes the two calls of an operation."""
    torch, whole, rows = kind.torch, [kind.replicate], [kind.shard(0)]
    functional = torch.nn.functional
    generator = torch.Generator().manual_seed(0)

    def pair(call: Callable[..., object], *operands: tuple[tuple[int, ...], Any]) -> Pair:
        values = [torch.rand(shape, generator=generator) for shape, _ in operands]
        sharded = [kind.distribute(x, mesh, p) for x, (_, p) in zip(values, operands, strict=True)]
        # Plain calls work on what each rank holds: the difference is what the library adds.
        local = [x.to_local() for x in sharded]
        return (lambda: call(*local)), (lambda: call(*sharded))

    heads = ((2, 4, 8, 16), [kind.shard(1)])

    def attention(q: Any) -> Any:
        return functional.scaled_dot_product_attention(q, q, q)

    def view() -> Pair:
        x = torch.rand((8, 16), generator=generator)
        sharded = kind.distribute(x, mesh, rows)
        local = sharded.to_local()
        return (lambda: local.view(4, 4, 4)), (lambda: sharded.view(8, 4, 4))

    return {
        "add": lambda: pair(lambda x, y: x + y, ((8, 16), rows), ((8, 16), rows)),
        "mul": lambda: pair(lambda x, y: x * y, ((8, 16), rows), ((8, 16), rows)),
        "mul-by-scalar": lambda: pair(lambda x: x * 2.0, ((8, 16), rows)),
        "linear": lambda: pair(functional.linear, ((8, 16), whole), ((32, 16), rows), ((32,), rows)),
        "view": view,
        "gelu": lambda: pair(functional.gelu, ((8, 16), rows)),
        "layer-norm": lambda: pair(
            lambda x, w, b: functional.layer_norm(x, (16,), w, b, 1e-5),
            ((8, 16), rows),
            ((16,), whole),
            ((16,), whole),
        ),
        "sdpa": lambda: pair(attention, heads),
    }


OPERATIONS = ("add", "mul", "mul-by-scalar", "linear", "view", "gelu", "layer-norm", "sdpa")


def measure_overhead(name: str, operations: Sequence[str]) -> Sample:
    """On a rank: the median over operations of what one call adds to the plain one, in microseconds."""
    kind = Kind(name)
    mesh = kind.mesh("cpu", NUM_RANKS)
    made = _operations(kind, mesh)
    # torch's own has no rule for the fused attention of CPUs, and none for its causal mask: both sides take the composed one.
    with kind.torch.no_grad(), kind.torch.nn.attention.sdpa_kernel(kind.torch.nn.attention.SDPBackend.MATH):
        added = [overhead(made[operation]()) for operation in operations]
    return Sample(statistics.median(added))


def overhead(pair: Pair, num_calls: int = NUM_CALLS) -> float:
    """What the second call takes longer than the first, in microseconds; both are warm."""
    for call in pair:
        for _ in range(num_calls // 3):
            call()
    best = [float("inf")] * 2
    for _ in range(NUM_REPEATS):
        for i, call in enumerate(pair):
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / num_calls * 1e6)
    return best[1] - best[0]


def measure_training(name: str) -> Sample:
    """On a rank: what a forward and backward of linear, gelu and sum adds to the plain one, in microseconds."""
    kind = Kind(name)
    torch, mesh = kind.torch, kind.mesh("cpu", NUM_RANKS)
    x = kind.distribute(torch.rand(8, 16), mesh, [kind.replicate])
    weight = kind.distribute(torch.rand(32, 16), mesh, [kind.shard(0)]).requires_grad_()
    local = [x.to_local().detach(), weight.to_local().detach().clone().requires_grad_()]

    def step(x: Any, weight: Any) -> None:
        torch.nn.functional.gelu(torch.nn.functional.linear(x, weight)).sum().backward()
        weight.grad = None

    return Sample(overhead((lambda: step(*local), lambda: step(x, weight)), num_calls=100))


def _case(
    name: str, summary: str, function: Callable[..., Sample], goal: float, *args: Any, unit: str = "us added"
) -> Case:
    return Case(
        name=name,
        summary=summary,
        ours=measured_on_ranks(NUM_RANKS, function, "ours", *args),
        peer=measured_on_ranks(NUM_RANKS, function, "torch", *args),
        peer_name="torch.distributed.tensor",
        unit=unit,
        better=Better.LOWER,
        goal=goal,
    )


CASES = (
    _case(
        "dtensor-operations",
        f"the median over {', '.join(OPERATIONS)} of what a cached call adds to the plain one, 2 ranks",
        measure_overhead,
        0.25,
        OPERATIONS,
    ),
    *(
        _case(
            f"dtensor-{name}",
            f"what a cached {name} adds to the plain one, 2 ranks",
            measure_overhead,
            0.4,
            (name,),
        )
        for name in OPERATIONS
    ),
    _case(
        "dtensor-training",
        "what forward and backward of linear, gelu and sum add to the plain ones, 2 ranks",
        measure_training,
        1 / 12,
    ),
)
