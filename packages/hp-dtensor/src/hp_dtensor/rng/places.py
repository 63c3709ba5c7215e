"""Where draws come from and where they go: the stream that is used, and the elements that a rank holds."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from hp_dtensor.placements import REPLICATE, Partial, Placement
from hp_dtensor.spec import Spec, shown
from hp_platform import RandomStream, default_random_stream, get_platform
from hp_platform.draws import Region
from hp_platform.random_stream import Draw

Tensor = Any
Generator: TypeAlias = "RandomStream | None"


def region_of(spec: Spec) -> Region:
    """The elements of the whole that this rank's piece holds. A ragged piece is a run of the whole in its flat order."""
    is_block = len(spec.local_shape) == len(spec.shape)
    return Region(spec.shape if is_block else (math.prod(spec.shape),), spec.local_offset, spec.local_shape)


def place_of(x: Any) -> tuple[Tensor, Region]:
    """The local tensor of ``x``, a DTensor or plain one, and its elements. ValueError for what is no tensor."""
    if is_dtensor(x):
        return x._local, region_of(x._spec)
    if not get_platform().is_tensor(x):
        raise ValueError(f"random values go into tensors, got {type(x).__name__}")
    return x, Region.whole(tuple(x.shape))


def is_dtensor(x: Any) -> bool:
    """Whether it is a DTensor of this library."""
    from hp_dtensor.dtensor import DTensorMethods

    return isinstance(x, DTensorMethods)


def wrapped_as(x: Any, local: Tensor) -> Any:
    """``local`` as what ``x`` is: a DTensor that lies likewise, or a plain tensor."""
    return x._wrap(local, x._spec) if is_dtensor(x) else local


def whole_placements(spec: Spec) -> tuple[Placement, ...]:
    """The placements with every Partial made Replicate: where new values can lie."""
    return tuple(REPLICATE if isinstance(p, Partial) else p for p in spec.placements)


def refuse_partial(spec: Spec, what: str) -> None:
    """ValueError for a Partial: a value written into it would be a summand."""
    if any(isinstance(placement, Partial) for placement in spec.placements):
        raise ValueError(
            f"{what} a DTensor with placements {shown(spec.placements)} would draw summands, not values: redistribute it to "
            f"Shard or Replicate first"
        )


def take(generator: Generator) -> Draw:
    """The place of the next operation in ``generator``, a :class:`hp_platform.RandomStream`; None: in the default one.

    ValueError for another kind of generator. RuntimeError where torch's checkpointing runs a forward again and the stream was
    not set back: the second forward would draw other numbers than the first.
    """
    if generator is not None and not isinstance(generator, RandomStream):
        raise ValueError(
            f"generator={type(generator).__name__}: draws that do not depend on the sharding come from a "
            f"hp_dtensor.random.RandomStream; give one, or leave it out for the stream that manual_seed seeds"
        )
    stream: RandomStream = default_random_stream() if generator is None else generator
    if not stream.is_replaying and get_platform().is_recomputing():
        raise RuntimeError(
            "a forward that draws random numbers runs again under torch.utils.checkpoint, and would draw other ones than "
            "before: call checkpoint(..., context_fn=hp_dtensor.random.checkpoint_contexts), or use hp_recompute"
        )
    return stream.next()
