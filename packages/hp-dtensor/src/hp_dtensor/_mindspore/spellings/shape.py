"""What takes apart, cuts out and pads: mostly by operations on DTensors that have rules."""

from __future__ import annotations

from typing import Any

from mindspore import ops

from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling


@spelling("split", "Split")
def _split(operation: Operation, x: Any, dim: int, count: int) -> Any:
    """In equal parts."""
    if x.shape[dim] % count:
        raise ValueError(
            f"Split takes {count} equal parts of a dim of size {x.shape[dim]}: give one that divides it"
        )
    return x.split(x.shape[dim] // count, dim)


@spelling("unbind", "Unstack")
def _unstack(operation: Operation, x: Any) -> Any:
    return x.unbind(operation.attributes.attrs["axis"])


@spelling("flatten", "Flatten")
def _flatten(operation: Operation, x: Any) -> Any:
    """All dims but the first."""
    count = 1
    for n in x.shape[1:]:
        count = count * n
    return x.reshape((x.shape[0], count))


@spelling("narrow", "Slice")
def _slice(operation: Operation, x: Any, begin: Any, size: Any) -> Any:
    for dim, (first, length) in enumerate(zip(begin, size, strict=True)):
        length = x.shape[dim] - first if length == -1 else length
        if length != x.shape[dim]:
            x = x.narrow(dim, first, length)
    return x


@spelling("getitem", "StridedSlice")
def _strided_slice(operation: Operation, x: Any, begin: Any, end: Any, strides: Any, *masks: int) -> Any:
    if any(masks):
        raise NotImplementedError(
            "mindspore: StridedSlice of DTensors takes no masks: write x[begin:end:step] instead"
        )
    return x[tuple(slice(*bounds) for bounds in zip(begin, end, strides, strict=True))]


@spelling("triangle", "Tril")
def _tril(operation: Operation, x: Any) -> Any:
    return x.tril(operation.attributes.attrs["diagonal"])


@spelling("triangle", "TrilExt")
def _tril_function(operation: Operation, x: Any, diagonal: int = 0) -> Any:
    return operation.follow("triangle", operation.native_or(ops.tril), x, diagonal)


@spelling("repeat_interleave", "RepeatInterleaveInt")
def _repeat_interleave(operation: Operation, x: Any, times: int, dim: Any = None, size: Any = None) -> Any:
    def local(own: Any, *given: Any) -> Any:
        return ops.repeat_interleave(own, *given) if is_on_cpu(own) else operation.native(own, *given, None)

    return operation.follow("repeat_interleave", local, x, times, dim)


@spelling("pad", "ConstantPadND")
def _constant_pad(operation: Operation, x: Any, pads: Any, value: Any = 0) -> Any:
    return operation.follow("pad", ops.pad, x, tuple(pads), "constant", value)


@spelling("pad", "PadV3")
def _pad(operation: Operation, x: Any, pads: Any, value: Any = None) -> Any:
    mode = operation.attributes.mode
    number = () if value is None or mode != "constant" else (float(value.asnumpy().item()),)
    return operation.follow("pad", ops.pad, x, tuple(pads), mode, *number)


@spelling("pad", "Pad")
def _pad_of_object(operation: Operation, x: Any) -> Any:
    """Zeros; the pairs of numbers begin with the first dim."""
    return operation.follow("pad", ops.pad, x, _from_last(operation.attributes.init_attrs["paddings"]))


@spelling("pad", "MirrorPad")
def _mirror_pad(operation: Operation, x: Any, paddings: Any) -> Any:
    """Copies of old values, with or without the outermost; ``paddings`` is a plain tensor, equal on all ranks."""

    def local(own: Any, *_: Any) -> Any:
        return operation.native(own, paddings)

    mode = operation.attributes.init_attrs["mode"].lower()
    return operation.follow("pad", local, x, _from_last(paddings.asnumpy().tolist()), mode)


def _from_last(pairs: Any) -> tuple[int, ...]:
    return tuple(int(n) for pair in reversed(tuple(pairs)) for n in pair)


@spelling("meshgrid", "Meshgrid")
def _meshgrid(operation: Operation, vectors: Any, indexing: int) -> Any:
    """The number is 1 where the first two dims are swapped."""

    def local(own: Any, **_: Any) -> Any:
        return operation.native(own, indexing)

    return operation.follow("meshgrid", local, *vectors, indexing="xy" if indexing else "ij")


@spelling("pointwise", "GeluExt")
def _gelu(operation: Operation, x: Any, approximate: str = "none") -> Any:
    def local(own: Any, approximate: str) -> Any:
        if is_on_cpu(own):
            return ops.gelu(own, approximate=approximate)
        return operation.native(own, approximate=approximate)

    return operation.follow("pointwise", local, x, approximate=approximate)


@spelling("mul", "Swiglu")
def _swiglu(operation: Operation, x: Any, dim: int = -1) -> Any:
    """``silu(a) b`` of the halves, by operations on DTensors."""
    half = x.shape[dim] // 2
    gate, value = x.split(half, dim)
    return gate * gate.sigmoid() * value


@spelling("any", "Any")
def _any(operation: Operation, x: Any) -> Any:
    return operation.follow("any", operation.native, x)
