"""``linear_cross_entropy`` of DTensors: how layer, input and target must lie, and the loss of the local tensors."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DTensor, across, custom_shard
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.placements import PARTIAL, REPLICATE, Placement, Shard
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_tp.loss.classes import cut_of_spec
from hp_tp.loss.cross_entropy import reduced
from hp_tp.loss.linear import check_shapes, of_plain
from hp_tp.loss.options import LossOptions, check_target, check_weight

Tensor = Any
Placements = tuple[Placement, ...]
_NAME = "linear_cross_entropy"


def of_dtensors(
    x: Any,
    linear_weight: Any,
    linear_bias: Any,
    target: Any,
    weight: Any,
    options: LossOptions,
    chunk_size: int | None,
) -> Any:
    """The loss, as a DTensor, or plain for a plain input."""
    if not is_dtensor(linear_weight) or (linear_bias is not None and not is_dtensor(linear_bias)):
        name = "linear_bias" if is_dtensor(linear_weight) else "linear_weight"
        raise ValueError(
            f"{_NAME} got {name} as a plain tensor beside DTensors: say how it lies, with distribute_tensor or "
            f"DTensor.from_local"
        )
    mesh = linear_weight.device_mesh
    is_plain = not is_dtensor(x)
    if is_plain and len(mesh.shape) > 1:
        raise ValueError(
            f"{_NAME} got a plain input beside a linear_weight on {mesh}: it may be equal on all ranks, or cut along one of the "
            f"{len(mesh.shape)} mesh dims: say which, with DTensor.from_local(input, mesh, placements)"
        )
    bias_shape = None if linear_bias is None else tuple(linear_bias.shape)
    check_shapes(tuple(x.shape), tuple(linear_weight.shape), bias_shape)
    shape = tuple(x.shape[:-1])
    check_target(_NAME, target, shape, f"input of shape {tuple(x.shape)}")
    check_weight(_NAME, weight, linear_weight.shape[0])
    layer = linear_weight, linear_bias
    if is_plain and not (is_dtensor(target) or is_dtensor(weight)) and _lies_as_used(layer):
        return _of_locals(x, layer, target, weight, options, chunk_size)
    if is_plain:
        x = DTensor.from_local(x, mesh, [REPLICATE])
    whole = [REPLICATE] * len(mesh.shape)
    target = target if is_dtensor(target) else DTensor.from_local(target, mesh, whole)
    if weight is not None and not is_dtensor(weight):
        weight = DTensor.from_local(weight, mesh, whole)

    of_layer = _as_layer(linear_weight.placements)
    of_rows = tuple(
        own if _cuts_rows(own, len(shape)) and not isinstance(cut, Shard) else REPLICATE
        for own, cut in zip(x.placements, of_layer, strict=True)
    )
    differs = tuple(
        isinstance(p, Shard) or isinstance(q, Shard) for p, q in zip(of_layer, of_rows, strict=True)
    )
    spec = make_spec(mesh, of_rows, (*shape, 1))
    row_dims = across.cutting(spec, range(len(shape)))
    of_classes = cut_of_spec(make_spec(mesh, of_layer, tuple(linear_weight.shape)), 0)
    if options.reduction == "none":
        of_loss, loss_shape = of_rows, shape
    else:
        of_loss, loss_shape = tuple(PARTIAL if isinstance(p, Shard) else p for p in of_rows), ()

    def local(own: Tensor, w: Tensor, b: Tensor | None, rows: Tensor, weights: Tensor | None) -> Tensor:
        platform = get_platform()
        losses, counts = of_plain(
            (own, w, b), rows, weights, of_classes, options, chunk_size, is_summand=True
        )
        count = across.reduced(platform.sum(counts), spec, row_dims, "sum")
        return reduced(losses, count, options.reduction, tuple(rows.shape))

    run = custom_shard(
        local,
        mesh,
        list(of_loss),
        (
            list(of_rows),
            list(of_layer),
            None if linear_bias is None else list(of_layer),
            list(of_rows),
            None if weight is None else whole,
        ),
        in_grad_placements=(
            _gradient_of(of_rows, differs),
            _gradient_of(of_layer, differs),
            None if linear_bias is None else _gradient_of(of_layer, differs),
            None,
            None,
        ),
        out_shapes=lambda *_: loss_shape,
    )
    loss = run(x, linear_weight, linear_bias, target, weight)
    return loss.to_local() if is_plain else loss


def _lies_as_used(layer: tuple[Any, Any]) -> bool:
    """Whether weight and bias lie as they are used, so that nothing is to be moved."""
    weight, bias = layer
    own = tuple(weight.placements)
    return own == _as_layer(own) and (bias is None or tuple(bias.placements) == own)


def _of_locals(
    x: Tensor,
    layer: tuple[Any, Any],
    target: Tensor,
    weight: Any,
    options: LossOptions,
    chunk_size: int | None,
) -> Tensor:
    """The plain loss of a plain input, equal on all ranks: what the general way does for it, in a third of the host's time."""
    linear_weight, linear_bias = layer
    cut = cut_of_spec(
        make_spec(linear_weight.device_mesh, linear_weight.placements, tuple(linear_weight.shape)), 0
    )
    own = x, linear_weight.to_local(), None if linear_bias is None else linear_bias.to_local()
    losses, counts = of_plain(own, target, weight, cut, options, chunk_size, is_summand=False)
    return reduced(losses, get_platform().sum(counts), options.reduction, tuple(target.shape))


def _as_layer(own: Placements) -> Placements:
    """How the layer is used: cut by classes, or whole."""
    return tuple(p if p == Shard(0) else REPLICATE for p in own)


def _cuts_rows(own: Placement, num_dims: int) -> bool:
    return isinstance(own, Shard) and own.dim < num_dims


def _gradient_of(own: Placements, differs: tuple[bool, ...]) -> list[Placement]:
    """What backward gives: of what is whole a summand, where ranks have other classes or other rows."""
    return [
        PARTIAL if differ and not isinstance(p, Shard) else p for p, differ in zip(own, differs, strict=True)
    ]
