"""Normalisations: layer, RMS, group, batch and instance norm, and vectors of length one.

What is normalised over lies whole on every rank; weights lie whole, or are cut like the channels that they scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor import across
from hp_dtensor.placements import REPLICATE, Shard
from hp_dtensor.rules.along import dim_of, dims_of, lying
from hp_dtensor.rules.batch_statistics import batch_normed, update_by_instances
from hp_dtensor.rules.elementwise import broadcast_shape, pointwise
from hp_dtensor.rules.registry import Outcome, Placements, rule
from hp_dtensor.spec import Spec, local_block, make_spec


def _over_last(x: Spec, normalized_shape: Any, weights: Sequence[Any]) -> Outcome:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"normalized_shape {shape} is not how the shape {x.shape} of the input ends")
    for weight in weights:
        if weight is not None and weight.shape != shape:
            raise ValueError(
                f"weight and bias have the shape {shape} that is normalised over, got {weight.shape}"
            )
    dims = range(len(x.shape) - len(shape), len(x.shape))
    lies = lying(x, dims)
    wholes = tuple(None if w is None else (REPLICATE,) * len(lies) for w in weights)
    return _alike(x, (lies, None, *wholes), lies)


@rule("layer_norm", params=("input", "normalized_shape", ("weight", None), ("bias", None), ("eps", 1e-5)))
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, *rest: Any) -> Outcome:
    """``layer_norm(x, normalized_shape, weight, bias, eps)``."""
    return _over_last(x, normalized_shape, (weight, bias))


@rule("rms_norm", params=("input", "normalized_shape", ("weight", None), ("eps", None)))
def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Outcome:
    """``rms_norm(x, normalized_shape, weight, eps)``."""
    return _over_last(x, normalized_shape, (weight,))


def _alike(x: Spec, wishes: tuple[Any, ...], lies: Placements) -> Outcome:
    """The result has the shape of ``x`` and lies as it. Kernels are not asked about a piece without elements."""
    while wishes[-1] is None:
        wishes = wishes[:-1]
    piece, _ = local_block(x.shape, lies, x.mesh.shape, x.mesh.get_coordinate())
    return Outcome(wishes, lies, x.shape, run=(lambda local, *_: local) if 0 in piece else None)


def _over_channels(x: Spec, inputs: Placements, vectors: Sequence[Any]) -> tuple[Any, ...]:
    """How vectors with one number per channel (dim 1 of ``x``) lie beside ``x``."""
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[1:2]:
            raise ValueError(
                f"a tensor of shape {x.shape} has {x.shape[1]} channels, the vector {vector.shape}"
            )
    lies = tuple(Shard(0) if p == Shard(1) else REPLICATE for p in inputs)
    return tuple(None if vector is None else lies for vector in vectors)


@rule("group_norm", params=("input", "num_groups", ("weight", None), ("bias", None), ("eps", 1e-5)))
def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, *rest: Any) -> Outcome:
    """``group_norm(x (n, channels, ...), num_groups, ...)``. A cut of the channels stays where it cuts no group."""
    if len(x.shape) < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"shape {x.shape} has no channels (dim 1) that make {num_groups} groups")
    cutting = [n for p, n in zip(x.placements, x.mesh.shape, strict=True) if p == Shard(1)]
    parts = math.prod(cutting)
    stays = num_groups % parts == 0
    inputs = lying(x, [d for d in range(1, len(x.shape)) if d > 1 or not stays])
    own_groups = num_groups // parts if any(p == Shard(1) for p in inputs) else num_groups
    wishes = (inputs, None, *_over_channels(x, inputs, (weight, bias)))
    return replace(_alike(x, wishes, inputs), replaced={1: own_groups})


@rule(
    "batch_norm",
    params=(
        "input", "running_mean", "running_var", ("weight", None), ("bias", None), ("training", False),
        ("momentum", 0.1), ("eps", 1e-5),
    ),
)  # fmt: skip
def batch_norm(
    x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, *rest: Any
) -> Outcome:
    """``batch_norm(x (n, channels, ...), running_mean, running_var, ...)``: with the running statistics elementwise.

    While training, the statistics are those of the whole batch: where that is cut, two all-reduces of a number per channel
    forward, and two backward. Channels may be cut, and the running statistics with them, which every rank updates alike.
    """
    if len(x.shape) < 2:
        raise ValueError(f"batch_norm takes (n, channels, ...), got shape {x.shape}")
    inputs = lying(x)
    vectors = _over_channels(x, inputs, (mean, var, weight, bias))
    found = _alike(x, (inputs, *vectors), inputs)
    if not training:
        return found
    dims = [d for d in range(len(x.shape)) if d != 1]
    if math.prod(x.shape[d] for d in dims) < 2:
        raise ValueError(f"batch_norm in training needs more than one value per channel, got shape {x.shape}")
    _check_written("batch_norm in training", x, (mean, var), vectors)
    mesh_dims = across.cutting(make_spec(x.mesh, inputs, x.shape), dims)
    if not mesh_dims:
        return found
    momentum, eps = (*rest, *(0.1, 1e-5)[len(rest) :])[:2]

    def run(local: Any, *given: Any) -> Any:
        running_mean, running_var, *scale = (*given[:4], *(None,) * 4)[:4]
        return batch_normed(
            local, x, mesh_dims, (running_mean, running_var), (scale[0], scale[1]), momentum, eps
        )

    return replace(found, run=run, meets_others=True)


def _check_written(name: str, x: Spec, running: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Running statistics are written, so they must lie as they will."""
    for statistic, lies in zip(running, wanted, strict=False):
        if statistic is not None and statistic.placements != lies:
            raise ValueError(
                f"{name} writes the running statistics, which lie as {statistic.placements}: beside an input {x} they must "
                f"lie as {lies}; redistribute them before"
            )


@rule(
    "instance_norm",
    params=(
        "input", ("running_mean", None), ("running_var", None), ("weight", None), ("bias", None),
        ("use_input_stats", True), ("momentum", 0.1), ("eps", 1e-5),
    ),
)  # fmt: skip
def instance_norm(
    x: Any,
    mean: Any = None,
    var: Any = None,
    weight: Any = None,
    bias: Any = None,
    uses_own: bool = True,
    *rest: Any,
) -> Outcome:
    """``instance_norm(x (n, channels, ...))``: over all dims but the first two; with the running statistics elementwise.

    Running statistics that are updated are means over the batch: one all-reduce of two numbers per channel where it is cut.
    """
    if len(x.shape) < 3:
        raise ValueError(f"instance_norm takes (n, channels, ...), got shape {x.shape}")
    inputs = lying(x, range(2, len(x.shape)) if uses_own else ())
    vectors = _over_channels(x, inputs, (mean, var, weight, bias))
    found = _alike(x, (inputs, *vectors), inputs)
    if not uses_own or (mean is None and var is None):
        return found
    if math.prod(x.shape[2:]) < 2:
        raise ValueError(
            f"instance_norm in training needs more than one value per channel, got shape {x.shape}"
        )
    _check_written("instance_norm in training", x, (mean, var), vectors)
    mesh_dims = across.cutting(make_spec(x.mesh, inputs, x.shape), (0,))
    momentum, eps = (*rest, *(0.1, 1e-5)[len(rest) :])[:2]

    def around(function: Any) -> Any:
        def run(local: Any, *given: Any) -> Any:
            running_mean, running_var, *scale = (*given[:4], *(None,) * 4)[:4]
            update_by_instances(local, x, mesh_dims, (running_mean, running_var), momentum)
            if 0 in local.shape:
                return local
            return function(local, None, None, *scale, True, momentum, eps)

        return run

    return replace(found, run=None, around=around)


@rule("normalize", params=("input", ("p", 2.0), ("dim", 1), ("eps", 1e-12)))
def normalize(x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Outcome:
    """``x / max(norm(x, p, dim), eps)``."""
    lies = lying(x, dims_of(dim, len(x.shape)))
    return Outcome((lies,), lies, x.shape)


@rule("cosine_similarity", params=("x1", "x2", ("dim", 1), ("eps", 1e-8)))
def cosine_similarity(x: Any, y: Any, dim: int = 1, *rest: Any) -> Outcome:
    """The cosine of vectors along ``dim``, with broadcasting; every rank has whole vectors."""
    shape = broadcast_shape((x.shape, y.shape))
    at = next(iter(dim_of(dim, len(shape))), 0)
    both = pointwise((x, y))
    assert both.output is not None

    def whole_vectors(lies: Placements) -> Placements:
        return tuple(
            REPLICATE if out == Shard(at) else p for p, out in zip(lies, both.output or (), strict=True)
        )

    output = [REPLICATE if p == Shard(at) else p for p in both.output]
    moved = tuple(Shard(p.dim - (p.dim > at)) if isinstance(p, Shard) else p for p in output)
    return Outcome(tuple(map(whole_vectors, both.inputs)), moved, shape[:at] + shape[at + 1 :])
