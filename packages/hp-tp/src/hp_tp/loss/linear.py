"""``linear_cross_entropy``: the last layer of a language model and its loss, without the logits in between."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.module_tensors import is_dtensor
from hp_platform import get_platform
from hp_tp.loss.classes import ClassCut, cut_of_ranks
from hp_tp.loss.cross_entropy import reduced
from hp_tp.loss.linear_rows import linear_row_losses, usual_chunk
from hp_tp.loss.options import LossOptions, check_target, check_weight, checked_options

Tensor = Any
_NAME = "linear_cross_entropy"


def linear_cross_entropy(
    input: Tensor,  # noqa: A002 (torch's name)
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    num_classes: int | None = None,
    mesh: Any = None,
    group: Any = None,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`` that never holds the logits of all classes.

    The same values and gradients; the scores of ``chunk_size`` classes at a time are made, used, and made again in backward (the
    product for them is computed twice). The arguments are those of torch's function of this name. Three ways to call it:

    - Plain tensors: one process has all classes.
    - Plain tensors, and ``mesh`` or ``group``: each rank has the rows of ``linear_weight`` (and ``linear_bias``) of its own classes, as
      ``torch.chunk`` cuts ``num_classes``; ``input`` and ``target`` are equal on all ranks. The gradient of ``input`` is summed up over
      the ranks here: what is before needs no reduction of its own.
    - ``linear_weight`` a DTensor: where it is Shard(0), classes are cut; elsewhere it is used whole. ``input`` is a DTensor on the same
      mesh, whose rows may be cut over other mesh dims, or over the same one (sequence parallel: it is gathered, and its
      gradient takes a reduce-scatter); ``target`` is a DTensor or the whole plain one. The result is a DTensor, Replicate, or a
      Partial along mesh dims that cut rows. On a mesh of one dim ``input`` may be plain, equal on all ranks; then the result is.

    Args:
        input: ``(..., features)``, floating.
        linear_weight: ``(classes, features)``, the dtype of ``input``.
        target: class numbers ``0 ... classes - 1``, integers of shape ``(...)``.
        linear_bias: ``(classes,)``. Default: none.
        weight: of each class, ``(classes,)``, whole on every rank. Default: 1 each. Not differentiated.
        reduction: ``"none"``: the losses, in the shape of ``target``; ``"sum"``; ``"mean"``: divided by the sum of the weights of the
            targets that are not ignored (NaN if all are).
        ignore_index: this target counts for nothing.
        label_smoothing: share of the target, 0 to 1, that is spread evenly over all classes.
        chunk_size: how many classes are worked on at a time. Default: so many that their scores are 64 MB of float32 (128 MB with
            kernels, see below; 4 MB on a CPU), but at most a quarter of this rank's classes.
        num_classes: of all ranks together; only and always with ``mesh`` or ``group``.
        mesh: a mesh of one dim along which the classes are cut.
        group: or a process group, in the order of its ranks.

    Returns float32 for 16-bit operands, else their dtype. Scores of 16-bit operands are float32, never rounded; under
    ``torch.autocast`` operands are cast as those of ``linear`` are. Each row of the gradient of ``linear_weight`` is one product over
    all tokens, which kernels sum in float32; the gradient of ``input`` is added up over chunks in float32. Each is rounded once.

    On cuda with Triton, operands of 16 or 32 bits take kernels: one pass over a chunk's scores forward, and one backward.

    Memory: forward and backward take about three times the scores of a chunk (with kernels one and a half), and float32 of the size
    of ``input``; until backward nothing is kept but operands and a few numbers per token. A backward that is itself recorded (for second derivatives)
    holds the logits of this rank's classes.

    Communication with cut classes, whatever the number of chunks: one all-reduce (max) of a number per token, one (sum) of 2
    numbers per token, 3 with smoothing (with kernels one all-gather of 3 numbers per token instead, one more with smoothing, one with
    weights, one with both); in backward one all-reduce of the size of ``input``. ValueError for shapes, sizes, dtypes
    and options that do not fit; a target that is no class is refused by the framework's kernel.
    """
    options = checked_options(_NAME, reduction, ignore_index, label_smoothing)
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
    ):
        raise ValueError(
            f"{_NAME}: chunk_size is a number of classes of at least 1, or None for the default; got {chunk_size!r}"
        )
    if is_dtensor(linear_weight) or is_dtensor(input):
        from hp_tp.loss.linear_dtensors import of_dtensors

        if not (num_classes is None and mesh is None and group is None):
            raise ValueError(
                f"{_NAME} got DTensors, which say themselves how classes are cut: leave num_classes, mesh and group out"
            )
        return of_dtensors(input, linear_weight, linear_bias, target, weight, options, chunk_size)
    _check_layer(input, linear_weight, linear_bias)
    shape = tuple(input.shape[:-1])
    of_weight = f"linear_weight of shape {tuple(linear_weight.shape)}"
    cut = cut_of_ranks(_NAME, mesh, group, num_classes, linear_weight.shape[0], of_weight)
    check_target(_NAME, target, shape, f"input of shape {tuple(input.shape)}")
    check_weight(_NAME, weight, cut.num_classes)
    layer = input, linear_weight, linear_bias
    losses, counts = of_plain(layer, target, weight, cut, options, chunk_size, is_summand=False)
    return reduced(losses, get_platform().sum(counts), options.reduction, shape)


def of_plain(
    layer: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor,
    weight: Tensor | None,
    cut: ClassCut,
    options: LossOptions,
    chunk_size: int | None,
    *,
    is_summand: bool,
) -> tuple[Tensor, Tensor]:
    """The losses of this rank's rows, and what each counts in a mean.

    ``is_summand``: whether the gradient of the input may be this rank's summand; else it is summed here.
    """
    platform = get_platform()
    dtype = platform.product_dtype(layer[0])
    x, linear_weight = platform.cast(layer[0], dtype), platform.cast(layer[1], dtype)
    linear_bias = None if layer[2] is None else platform.cast(layer[2], dtype)
    x = platform.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if cut.groups and not is_summand and platform.requires_grad(x) and platform.is_grad_enabled():
        x = cut.used_differently(x)
    rows = platform.reshape(target, (-1,))
    chunk = chunk_size or usual_chunk(x, cut.size)
    return linear_row_losses(x, linear_weight, linear_bias, rows, weight, cut, options, chunk)


def _check_layer(x: Any, linear_weight: Any, linear_bias: Any) -> None:
    platform = get_platform()
    named = {"input": x, "linear_weight": linear_weight}
    if linear_bias is not None:
        named["linear_bias"] = linear_bias
    for name, one in named.items():
        if not platform.is_tensor(one) or not platform.is_floating(one.dtype):
            given = platform.dtype_name(one.dtype) if platform.is_tensor(one) else type(one).__name__
            raise ValueError(f"{_NAME}: {name} is a floating tensor, got {given}")
    bias_shape = None if linear_bias is None else tuple(linear_bias.shape)
    check_shapes(tuple(x.shape), tuple(linear_weight.shape), bias_shape)
    if platform.product_dtype(x) == x.dtype and linear_weight.dtype != x.dtype:
        names = [platform.dtype_name(one.dtype) for one in (x, linear_weight)]
        raise ValueError(f"{_NAME}: input is {names[0]}, linear_weight {names[1]}: cast one of them")


def check_shapes(
    x: tuple[int, ...], linear_weight: tuple[int, ...], linear_bias: tuple[int, ...] | None
) -> None:
    """ValueError unless they are those of a layer and its input."""
    if not x or len(linear_weight) != 2 or x[-1] != linear_weight[1]:
        raise ValueError(
            f"{_NAME} takes input (..., features) and linear_weight (classes, features), got shapes {x} and {linear_weight}"
        )
    if linear_bias is not None and linear_bias != linear_weight[:1]:
        raise ValueError(
            f"{_NAME}: linear_bias has one number for each class of linear_weight {linear_weight}, got shape {linear_bias}"
        )
