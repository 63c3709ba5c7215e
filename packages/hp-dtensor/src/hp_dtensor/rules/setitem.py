"""``x[...] = value``: the target stays as it lies, and every rank writes what falls into its piece.

The value is brought to where it is needed: cut as the target is where it has the same dim, whole elsewhere. Where a rank has
nothing to write it writes nothing, but by the same operation: the backward of all others waits for its share of the value's
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.lookup import own_numbers
from hp_dtensor.rules.registry import Outcome, Placements, rule
from hp_dtensor.rules.slices import Part
from hp_dtensor.rules.subscript import INDEX, MASK, Subscript, Template, entry_kind, normalised, parsed
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform

Tensor = Any
Shape = tuple[int, ...]


@rule("setitem", params=("input", "index", "value"), normalise=normalised, in_place=True)
def setitem(x: Any, template: Template, value: Any, *tensors: Any) -> Outcome:
    """Write into part of a tensor."""
    write = _Write(x, parsed(x, template, tensors), tensors, value)

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, _: Any, given: Any, *at: Tensor) -> Any:
            index, values = write.of_rank(local, given, at)
            if 0 in local.shape and not _has_gradient(values):
                return local
            return kernel(local, tuple(index), values)

        return run

    return Outcome(
        (x.placements, None, write.value_lies, *write.tensors_lie), x.placements, x.shape, around=around
    )


def _tensors_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, indices, values, *rest = args
    if isinstance(indices, Template):
        return args, kwargs
    if not isinstance(indices, (list, tuple)):
        raise ValueError(f"indices must be a tuple of tensors, got {type(indices).__name__}")
    template = Template(tuple(entry_kind(t) for t in indices))
    accumulate = bool(rest[0]) if rest else False
    return (x, template, values, accumulate, *indices), kwargs


@rule("index_put", params=("input", "indices", "values", ("accumulate", False)), normalise=_tensors_last)
def index_put(x: Any, template: Template, values: Any, accumulate: bool, *tensors: Any) -> Outcome:
    """Values written, or added, at the places that tensors name."""
    if not isinstance(values, Spec):
        raise ValueError(f"values must be a tensor, got {values!r}")
    target = x
    if accumulate:
        # A maximum plus something is not the maximum of the pieces plus something.
        linear = [REPLICATE if isinstance(p, Partial) and not p.is_linear else p for p in x.placements]
        target = make_spec(x.mesh, linear, x.shape)
    write = _Write(target, parsed(x, template, tensors), tensors, values, natively=False)

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, _: Any, given: Any, adds: bool, *at: Tensor) -> Any:
            index, own = write.of_rank(local, given, at)
            return kernel(local, tuple(i for i in index if not isinstance(i, slice)), own, adds)

        return run

    inputs = (target.placements, None, write.value_lies, None, *write.tensors_lie)
    return Outcome(inputs, target.placements, x.shape, around=around)


class _Write:
    """What each rank writes where."""

    def __init__(
        self, x: Spec, found: Subscript, tensors: Sequence[Spec], value: Any, *, natively: bool = True
    ) -> None:
        self.spec, self.found = x, found
        single = not isinstance(value, Spec) or math.prod(value.shape) == 1
        self.by_mask = natively and found.kinds == (MASK,) and single
        """One value wherever a mask says so: the mask may be cut as the target is, and its elements need not be counted."""
        self.cut_dims = {p.dim for p in x.placements if isinstance(p, Shard)}
        self.count = max(
            (1 if k == MASK else len(t.shape) for k, t in zip(found.kinds, tensors, strict=True)), default=0
        )
        """Of the result's dims that the tensors give."""
        plain = found.plain()
        self.place = found.place() if tensors else 0
        self.result: list[Any] = [*plain[: self.place], *["at"] * self.count, *plain[self.place :]]
        self.value_lies = self._value_lies(value) if isinstance(value, Spec) else None
        self.tensors_lie = [self._mask_lies(t) if self.by_mask else _whole(x) for t in tensors]
        if isinstance(value, Spec) and not found.has_masks:
            self._check(value, tensors)

    def _check(self, value: Spec, tensors: Sequence[Spec]) -> None:
        common = broadcast_shape([t.shape for t in tensors]) if tensors else ()
        sizes = iter(common)
        shape = tuple(
            next(sizes) if e == "at" else 1 if e is None else self.found.parts[e].count for e in self.result
        )
        if not stretches(value.shape, shape):
            raise ValueError(f"a value of shape {value.shape} does not fit a part of shape {shape}")

    def _value_lies(self, value: Spec) -> Placements:
        """Cut as the target along dims that are written whole; whole elsewhere; of a sum a summand."""
        shift = len(value.shape) - len(self.result)
        lies: list[Placement] = []
        for p in self.spec.placements:
            if isinstance(p, Shard):
                n = self.spec.shape[p.dim]
                at = self.result.index(p.dim) + shift if p.dim in self.result else -1
                fits = self.found.parts[p.dim] == Part(0, 1, n) and at >= 0 and value.shape[at] == n
                lies.append(replace(p, dim=at) if fits else REPLICATE)
            else:
                lies.append(p if isinstance(p, Partial) else REPLICATE)
        return tuple(lies)

    def _mask_lies(self, mask: Spec) -> Placements:
        first = self.found.indexed[0]
        last = first + len(mask.shape)
        return tuple(
            replace(p, dim=p.dim - first) if isinstance(p, Shard) and first <= p.dim < last else REPLICATE
            for p in self.spec.placements
        )

    def of_rank(self, local: Tensor, value: Any, tensors: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Index into this rank's piece, and what to write there."""
        platform, x, found = get_platform(), self.spec, self.found
        value = value if platform.is_tensor(value) else self._summand(value)
        has_value = platform.is_tensor(value)
        if self.by_mask and has_value:
            value = platform.reshape(value, ())
        shares = [
            part.within(o, n) for part, o, n in zip(found.parts, x.local_offset, x.local_shape, strict=True)
        ]
        if any(shares[d][1] == 0 for d in found.dropped):
            return [slice(0, 0)], _nothing_of(value, len(x.shape)) if has_value else value
        if has_value and not self.by_mask:
            value = self._own_part(value, shares)
        at = list(tensors)
        if not self.by_mask:
            at, value = self._own_places(at, value)
        index: list[Any] = []
        tensors_of = self._tensors_of(at)
        for entry in found.entries:
            if entry is None:
                index.append(None)
            elif isinstance(entry, tuple):
                index.extend(tensors_of[entry[1]])
            else:
                part, (first, n), o = found.parts[entry], shares[entry], x.local_offset[entry]
                start = part.start + first * part.step - o
                if entry in found.dropped:
                    index.append(start)
                else:
                    index.append(slice(start, start + n * part.step, part.step) if n else slice(0, 0))
        return index, value

    def _summand(self, value: Any) -> Any:
        """A number that is written into a sum: the first rank writes it, the others what changes nothing."""
        for p, coordinate in zip(self.spec.placements, self.spec.mesh.get_coordinate(), strict=True):
            if coordinate and p.is_partial("sum"):
                value = 0
            elif coordinate and p.is_partial("prod"):
                value = 1
        return value

    def _own_part(self, value: Tensor, shares: Sequence[tuple[int, int]]) -> Tensor:
        """The part of the value for this rank's share of slices."""
        shift = len(value.shape) - len(self.result)
        lies = self.value_lies
        assert lies is not None
        for i, entry in enumerate(self.result):
            dim = i + shift
            if dim < 0 or entry is None or entry == "at" or any(p.is_shard(dim) for p in lies):
                continue
            count, (first, n) = self.found.parts[entry].count, shares[entry]
            if value.shape[dim] == count and n != count:
                value = get_platform().narrow(value, dim, first, n)
        return value

    def _own_places(self, tensors: list[Tensor], value: Any) -> tuple[list[Any], Any]:
        """For each tensor index the vectors of places, and of those along cut dims only this rank's; the value likewise."""
        numbers: list[list[Tensor]] = []
        for kind, tensor in zip(self.found.kinds, tensors, strict=True):
            numbers.append([tensor] if kind == INDEX else _places_of(tensor))
        dims = self.found.indexed
        if not self.cut_dims & set(dims):
            return numbers, value
        platform, flat = get_platform(), [t for group in numbers for t in group]
        common = broadcast_shape([tuple(t.shape) for t in flat])
        places = platform.arange(0, math.prod(common), device=platform.device_of(flat[0]))
        spread = [platform.reshape(t, (-1,))[_positions(tuple(t.shape), common, places)] for t in flat]
        mine = places >= 0
        own = []
        for dim, t in zip(dims, spread, strict=True):
            n, offset, size = self.spec.shape[dim], self.spec.local_offset[dim], self.spec.local_shape[dim]
            t = platform.where(t < 0, t + n, t)
            here, inner = own_numbers(t, offset, size, n) if size else (t != t, t)
            mine = mine & here
            own.append(inner)
        kept = places[mine]
        own = [t[mine] for t in own]
        split, i = [], 0
        for group in numbers:
            split.append(own[i : i + len(group)])
            i = i + len(group)
        return split, self._value_at(value, common, kept) if platform.is_tensor(value) else value

    def _value_at(self, value: Tensor, common: Shape, kept: Tensor) -> Tensor:
        """The value's dims for the tensors as one dim, of which the places ``kept`` are left."""
        platform = get_platform()
        shift = len(value.shape) - len(self.result)
        first, end = max(0, self.place + shift), self.place + self.count + shift
        if end <= 0 or first >= end:
            return value
        own = tuple(value.shape[first:end])
        flat = platform.reshape(value, (*value.shape[:first], math.prod(own), *value.shape[end:]))
        index = (*(slice(None),) * first, _positions(own, common, kept))
        return flat[index]

    def _tensors_of(self, at: list[Any]) -> list[list[Any]]:
        return [entry if isinstance(entry, list) else [entry] for entry in at]


def stretches(own: Shape, shape: Shape) -> bool:
    """Whether a value of shape ``own``, but for leading dims of size 1, stretches to ``shape``."""
    extra = len(own) - len(shape)
    own = own[max(0, extra) :] if math.prod(own[: max(0, extra)]) == 1 else own
    missing = len(shape) - len(own)
    return missing >= 0 and all(n in (1, m) for n, m in zip(own, shape[missing:], strict=True))


def _whole(x: Spec) -> Placements:
    return (REPLICATE,) * len(x.placements)


def _has_gradient(value: Any) -> bool:
    platform = get_platform()
    return platform.is_tensor(value) and platform.requires_grad(value)


def _nothing_of(value: Tensor, ndim: int) -> Tensor:
    """No element of the value, as an operand for ``ndim`` dims."""
    platform = get_platform()
    none = platform.narrow(platform.reshape(value, (-1,)), 0, 0, 0)
    return platform.reshape(none, (0, *(1,) * (ndim - 1)))


def _places_of(mask: Tensor) -> list[Tensor]:
    """Where a mask is true: a vector of numbers for each of its dims."""
    platform = get_platform()
    shape = tuple(mask.shape)
    places = platform.arange(0, math.prod(shape), device=platform.device_of(mask))
    flat = places[platform.cast(platform.reshape(mask, (-1,)), "bool")]
    return [(flat // math.prod(shape[i + 1 :])) % n for i, n in enumerate(shape)]


def _positions(own: Shape, common: Shape, places: Tensor) -> Tensor:
    """Of flat places in a common shape, the flat places in a shape that stretches to it."""
    own = (1,) * (len(common) - len(own)) + own
    found = places * 0
    for i, n in enumerate(own):
        if n != 1:
            found = found + (places // math.prod(common[i + 1 :])) % n * math.prod(own[i + 1 :])
    return found
