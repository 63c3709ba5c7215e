"""torch.distributed.tensor as an oracle: the same programs on the same shards give the same values, gradients and placements.

Where the placements differ, the difference stands in ``DIFFERENT``, with its reason. Where torch refuses a program, ours is
still held to the unsharded one.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

import hp_dtensor as ours
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

# Sums of at most 60 products of numbers below 4, in float64.
TOLERANCE = 1e-11

# Name -> (shapes of the arguments, the program).
PROGRAMS: dict[str, tuple[list[tuple[int, ...]], Any]] = {
    "add": ([(4, 6), (4, 6)], lambda x, y: x + y),
    "mul": ([(4, 6), (4, 6)], lambda x, y: x * y),
    "mul by a number": ([(4, 6)], lambda x: x * 3.0),
    "exp": ([(4, 6)], lambda x: (x * 0.1).exp()),
    "gelu": ([(4, 6)], F.gelu),
    "matmul": ([(4, 6), (6, 4)], lambda x, y: x @ y),
    "linear": ([(2, 4, 6), (4, 6)], F.linear),
    "sum": ([(4, 6)], lambda x: x.sum()),
    "sum over rows": ([(4, 6)], lambda x: x.sum(0)),
    "mean over columns": ([(4, 6)], lambda x: x.mean(-1)),
    "view": ([(4, 6)], lambda x: x.view(2, 2, 6)),
    "flatten": ([(4, 2, 3)], lambda x: x.flatten(1)),
    "transpose": ([(4, 6)], lambda x: x.transpose(0, 1)),
    "permute": ([(4, 2, 6)], lambda x: x.permute(2, 0, 1)),
    "unsqueeze": ([(4, 6)], lambda x: x.unsqueeze(1)),
    "expand": ([(4, 1, 6)], lambda x: x.expand(4, 3, 6)),
    "softmax": ([(4, 6)], lambda x: torch.softmax(x, -1)),
    "layer norm": ([(4, 6), (6,), (6,)], lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "cat": ([(4, 6), (4, 6)], lambda x, y: torch.cat([x, y], 0)),
    "stack": ([(4, 6), (4, 6)], lambda x, y: torch.stack([x, y])),
    "chunk": ([(4, 6)], lambda x: x.chunk(2, 1)[1]),
    "slice": ([(4, 6)], lambda x: x[:, 1:4]),
    "tril": ([(4, 6)], torch.tril),
    "where": ([(4, 6), (4, 6)], lambda x, y: torch.where(x > 0, x, y)),
    "amax": ([(4, 6)], lambda x: x.amax(-1)),
    "mlp": ([(4, 6), (8, 6), (6, 8)], lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v)),
}

_KEEPS = "the cut can stay by the chunk rule, or the sum be carried on, without communication; torch makes it whole"
_CARRIES = "what is cut or whole becomes a summand for nothing, and the sum is reduced later, once; torch reduces it here"
_OWN_CUT = "either argument could move, at the same price: ours moves the second, torch the first"
_COUNTS_THE_SUM = (
    "torch makes one factor whole and leaves a sum for somebody else to reduce; ours counts that reduction, and takes the way "
    "that moves fewer bytes in all"
)
_CUTS_EARLIER = (
    "ours cuts a Replicate weight for nothing where torch reduces the input to what another argument has"
)
_SUMS = (
    "ours divides local sums by the global count, so that uneven shards are right; torch averages averages"
)

ARGUED_FROM = (2, 13)
"""The first torch whose choices the table is about."""

# Program -> placements of the arguments -> why the result lies otherwise than torch's.
DIFFERENT: dict[str, dict[str, str]] = {
    "add": {
        **dict.fromkeys(["S0 P", "S1 P", "P S0", "P S1"], _CARRIES),
        "S1 S0": _OWN_CUT,
    },
    "mul": {"S1 S0": _OWN_CUT, "P P": _COUNTS_THE_SUM},
    "matmul": dict.fromkeys(["S0 P", "S1 P", "P S0", "P S1", "P P"], _COUNTS_THE_SUM),
    "linear": {
        **dict.fromkeys(["S0 P", "S1 S1", "S1 P", "P S0", "P S1", "P P"], _COUNTS_THE_SUM),
        "S1 S0": _OWN_CUT,
    },
    "mean over columns": {"S1": _SUMS, "P": _KEEPS},
    "layer norm": dict.fromkeys(["P S0 S0", "P S0 R", "P S0 P", "P R S0", "P P S0"], _CUTS_EARLIER),
    "cat": dict.fromkeys(["S0 P", "S1 P", "P S0", "P S1"], _CARRIES),
    "stack": {
        **dict.fromkeys(["S0 P", "S1 P", "P S0", "P S1"], _CARRIES),
        **dict.fromkeys(["S0 S1", "S1 S0"], _KEEPS),
    },
    "where": {**dict.fromkeys(["R P", "P R", "P S0", "P S1"], _CARRIES), "P P": _KEEPS},
    "slice": {"S1": _KEEPS},
    "tril": dict.fromkeys(["S0", "S1", "P"], _KEEPS),
    "mlp": {
        **dict.fromkeys(["S0 S1 P", "S0 R P", "S0 P S1", "S0 P P"], _COUNTS_THE_SUM),
        **dict.fromkeys(["S0 P R", "P S0 R"], _KEEPS),
    },
}

KINDS = {"S0": 0, "S1": 1, "R": None, "P": "sum"}


def _placement(module: Any, kind: str) -> Any:
    if kind == "R":
        return module.Replicate()
    return module.Partial() if kind == "P" else module.Shard(KINDS[kind])


def _local(whole: torch.Tensor, kind: str, rank: int) -> torch.Tensor:
    """This rank's part: half of the whole, all of it, or one of two unequal summands."""
    if kind == "R":
        return whole.clone()
    if kind == "P":
        return whole * (0.25 if rank else 0.75)
    return whole.chunk(2, KINDS[kind])[rank].clone()


def _whole(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = 1
    for n in shape:
        count = count * n
    return torch.tensor([((start + 7 * i) % 23 - 11) / 4 for i in range(count)], dtype=torch.float64).view(
        shape
    )


def _run(module: Any, mesh: Any, program: Any, wholes: list[torch.Tensor], kinds: Any, rank: int) -> Any:
    """Placements, value and the gradients of the local leaves, put together."""
    leaves = [_local(x, kind, rank).requires_grad_() for x, kind in zip(wholes, kinds, strict=True)]
    inputs = [
        module.DTensor.from_local(leaf, mesh, [_placement(module, kind)])
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    result = program(*inputs)
    full = result.full_tensor()
    weights = torch.arange(1.0, full.numel() + 1, dtype=torch.float64).view(full.shape)
    (full * weights).sum().backward()
    return _shown(result.placements[0]), full.detach(), [leaf.grad for leaf in leaves]


def _shown(placement: Any) -> str:
    """``S0``, ``R`` or ``P sum``, for both libraries."""
    if placement.is_replicate():
        return "R"
    return f"P {placement.reduce_op}" if placement.is_partial() else f"S{placement.dim}"


def _expected_gradient(whole: torch.Tensor, kind: str, rank: int) -> torch.Tensor:
    """Of a sum every summand's gradient is that of the whole."""
    return whole if kind == "P" else _local(whole, kind, rank)


@distributed(2, backends="torch")
def test_values_gradients_and_placements_are_those_of_torch_or_the_difference_is_argued(world: World) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch_mesh = TorchMesh.from_group(dist.group.WORLD, "cpu")
    found: dict[str, dict[str, tuple[str, str]]] = {}
    compared = refused = 0
    for name, (shapes, program) in PROGRAMS.items():
        wholes = [_whole(shape, 3 * i) for i, shape in enumerate(shapes)]
        plain = [x.clone().requires_grad_() for x in wholes]
        expected = program(*plain)
        weights = torch.arange(1.0, expected.numel() + 1, dtype=torch.float64).view(expected.shape)
        (expected * weights).sum().backward()
        choices = [[k for k in KINDS if k != "S1" or (len(shape) > 1 and shape[1] > 1)] for shape in shapes]
        for kinds in itertools.product(*choices):
            label = f"{name} of {', '.join(kinds)}"
            place, value, grads = _run(ours, mesh, program, wholes, kinds, world.rank)
            assert_parity(value, expected.detach(), atol=TOLERANCE, rtol=0, name=label)
            for leaf, kind, grad in zip(plain, kinds, grads, strict=True):
                wanted = _expected_gradient(leaf.grad, kind, world.rank)
                assert_parity(grad, wanted, atol=TOLERANCE, rtol=0, name=f"gradient, {label}")
            try:
                other = _run(theirs, torch_mesh, program, wholes, kinds, world.rank)
            except (RuntimeError, NotImplementedError, ValueError, AssertionError):
                refused = refused + 1
                continue
            compared = compared + 1
            assert_parity(value, other[1], atol=TOLERANCE, rtol=0, name=f"torch's {label}")
            if place != other[0]:
                found.setdefault(name, {})[" ".join(kinds)] = (place, other[0])
    assert compared > (10 if torch.__version__ >= ARGUED_FROM else 8) * refused
    if torch.__version__ < ARGUED_FROM:
        return  # that DTensor refuses more, and chooses otherwise: values and gradients are what it can tell
    for name in {*found, *DIFFERENT}:
        places, argued = found.get(name, {}), DIFFERENT.get(name, {})
        assert set(places) == set(argued), (
            f"{name}: (ours, torch's) are {places}, argued are {sorted(argued)}"
        )
