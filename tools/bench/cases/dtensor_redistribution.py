"""One redistribution between two placements, ours beside torch.distributed.tensor, on GPUs where each rank has its own."""

from typing import Any

from bench.case import Better, Case, Sample
from bench.cases.dtensor import NUM_RANKS, NUM_REPEATS, Kind
from bench.ranks import device_type, measured_on_ranks, times_of_calls

# From placement, to placement; S0 and S1 are cuts of tensor dims 0 and 1. torch's own refuses to make a sum of what is whole.
PAIRS = ("S0-R", "S1-R", "S0-S1", "S1-S0", "R-S0", "R-S1", "P-R", "P-S0", "P-S1")
# The side of a square of float32; the middle one gives its cases no suffix.
SIDES = {"64KiB": 128, "1MiB": 512, "16MiB": 2048}


def placed(kind: Kind, placement: str, side: int, device: str) -> Any:
    """A square on a mesh of all ranks; as a sum, every rank's summand is the same."""
    torch = kind.torch
    num_ranks = torch.distributed.get_world_size()
    mesh = kind.mesh(device, num_ranks)
    values = torch.rand((side, side), generator=torch.Generator().manual_seed(0)).to(device)
    if placement == "P":
        return kind.from_local(values, mesh, [kind.partial])
    return kind.distribute(values, mesh, [by_name(kind)[placement]])


def by_name(kind: Kind) -> dict[str, Any]:
    """The placements of a library."""
    return {"S0": kind.shard(0), "S1": kind.shard(1), "R": kind.replicate, "P": kind.partial}


def measure_redistribution(name: str, pair: str, side: int) -> Sample:
    """On a rank: one redistribution of a square of float32, in microseconds, the fastest of fifteen repetitions."""
    kind = Kind(name)
    torch, device = kind.torch, device_type(NUM_RANKS)
    source, goal = pair.split("-")
    x, target = placed(kind, source, side, device), by_name(kind)[goal]
    _check(kind, x, target)
    num_calls = 10 if device == "cpu" else 50

    def call() -> None:
        # torch's own hands out a collective that has not ended; its local tensor is waited for where it is used.
        torch.sum(x.redistribute(placements=[target]).to_local()[:1, :1])

    with torch.no_grad():
        return Sample(min(times_of_calls(call, num_calls, NUM_REPEATS + 2, device)) * 1e6)


def _check(kind: Kind, x: Any, target: Any) -> None:
    """RuntimeError unless both ends have the same values."""
    torch = kind.torch
    with torch.no_grad():
        before, after = x.full_tensor(), x.redistribute(placements=[target]).full_tensor()
    if not torch.equal(before, after):
        raise RuntimeError(
            f"the redistribution to {target} changed values, so there is nothing to time: "
            f"they differ by up to {(before - after).abs().max().item()}"
        )


def _case(pair: str, size: str) -> Case:
    suffix = "" if size == "1MiB" else f"-{size}"
    return Case(
        name=f"dtensor-redistribute-{pair}{suffix}",
        summary=f"redistribution of {size.replace('MiB', ' MiB').replace('KiB', ' KiB')} from {pair.replace('-', ' to ')}, {NUM_RANKS} ranks",
        ours=measured_on_ranks(NUM_RANKS, measure_redistribution, "ours", pair, SIDES[size]),
        peer=measured_on_ranks(NUM_RANKS, measure_redistribution, "torch", pair, SIDES[size]),
        peer_name="torch.distributed.tensor",
        unit="us/call",
        better=Better.LOWER,
        goal=1.0,
    )


CASES = tuple(_case(pair, size) for size in ("1MiB", "64KiB", "16MiB") for pair in PAIRS)
