"""What each rank writes where, of a value and a subscript of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.lookup import own_numbers
from hp_dtensor.rules.refusals import is_beyond, refuse_beyond
from hp_dtensor.rules.registry import Placements
from hp_dtensor.rules.slices import Part
from hp_dtensor.rules.subscript import INDEX, MASK, Subscript
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any
Shape = tuple[int, ...]


class Write:
    """What each rank writes where."""

    def __init__(
        self,
        x: Spec,
        found: Subscript,
        tensors: Sequence[Spec],
        value: Any,
        *,
        natively: bool = True,
        adds: bool = False,
    ) -> None:
        self.spec, self.found = x, found
        self.cut_dims = {p.dim for p in x.placements if isinstance(p, Shard)}
        self.count = max(
            (1 if k == MASK else len(t.shape) for k, t in zip(found.kinds, tensors, strict=True)), default=0
        )
        """Of the result's dims that the tensors give."""
        plain = found.plain()
        self.place = found.place() if tensors else 0
        self.result: list[Any] = [*plain[: self.place], *["at"] * self.count, *plain[self.place :]]
        self.is_single = not isinstance(value, Spec) or math.prod(value.shape) == 1
        self.by_mask = natively and found.kinds == (MASK,) and (self.is_single or self._is_repeated(value))
        """The same wherever a mask says so: the mask may be cut as the target is, and its elements need not be counted."""
        self.common = broadcast_shape([t.shape for t in tensors]) if tensors and not found.has_masks else ()
        self.dealt = self._dealt(value, tensors) if adds and not found.has_masks else {}
        """Mesh dims of a sum to which every rank adds its part of the places: by that dim of theirs."""
        self.value_lies = self._value_lies(value) if isinstance(value, Spec) else None
        self.tensors_lie = [self._mask_lies(t) if self.by_mask else self._places_lie(t) for t in tensors]
        if isinstance(value, Spec) and not found.has_masks:
            self._check(value)

    def _check(self, value: Spec) -> None:
        sizes = iter(self.common)
        shape = tuple(
            next(sizes) if e == "at" else 1 if e is None else self.found.parts[e].count for e in self.result
        )
        if not stretches(value.shape, shape):
            raise ValueError(f"a value of shape {value.shape} does not fit a part of shape {shape}")

    def _is_repeated(self, value: Spec) -> bool:
        """Whether all places of a mask get the same."""
        at = self.place + len(value.shape) - len(self.result)
        return at < 0 or value.shape[at] == 1

    def _dealt(self, value: Any, tensors: Sequence[Spec]) -> dict[int, int]:
        found: dict[int, int] = {}
        shift = len(value.shape) - len(self.result)
        for mesh_dim, p in enumerate(self.spec.placements):
            own = value.placements[mesh_dim]
            cut = {
                len(self.common) - len(t.shape) + q.dim
                for t in tensors
                if isinstance(q := t.placements[mesh_dim], Shard)
            }
            if isinstance(own, Shard):
                cut.add(own.dim - shift - self.place)
            if (
                p.is_partial("sum")
                and not own.is_partial()
                and len(cut) == 1
                and cut <= set(range(self.count))
            ):
                found[mesh_dim] = cut.pop()
        return found

    def _places_lie(self, numbers: Spec) -> Placements:
        def lies(mesh_dim: int) -> Placement:
            dim = self.dealt.get(mesh_dim)
            own = -1 if dim is None else dim - len(self.common) + len(numbers.shape)
            return Shard(own) if own >= 0 and numbers.shape[own] == self.common[dim or 0] else REPLICATE

        return tuple(map(lies, range(len(self.spec.placements))))

    def _value_lies(self, value: Spec) -> Placements:
        """Cut as the target along dims that are written whole; whole elsewhere; of a sum a summand, or its part of the places."""
        shift = len(value.shape) - len(self.result)
        lies: list[Placement] = []
        nothing = any(part.count == 0 for part in self.found.parts)
        kept = [nothing and own.is_partial() for own in value.placements]
        # Another mesh dim's cut of the same dim would leave the value cut less often than the target.
        whole = {
            p.dim
            for p, keeps in zip(self.spec.placements, kept, strict=True)
            if keeps and isinstance(p, Shard)
        }
        for mesh_dim, p in enumerate(self.spec.placements):
            if mesh_dim in self.dealt:
                dim = self.dealt[mesh_dim]
                at = self.place + dim + shift
                lies.append(Shard(at) if at >= 0 and value.shape[at] == self.common[dim] else REPLICATE)
            elif kept[mesh_dim]:
                lies.append(value.placements[mesh_dim])
            elif isinstance(p, Shard):
                n = self.spec.shape[p.dim]
                at = self.result.index(p.dim) + shift if p.dim in self.result else -1
                is_written_whole = self.found.parts[p.dim] == Part(0, 1, n) and p.dim not in whole
                fits = is_written_whole and at >= 0 and value.shape[at] == n
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
        if self.by_mask and has_value and self.is_single:
            value = platform.reshape(value, ())
        shares = [
            part.within(o, n) for part, o, n in zip(found.parts, x.local_offset, x.local_shape, strict=True)
        ]
        if any(n == 0 for _, n in shares) and not found.has_masks:
            # Of nothing kernels look at no numbers.
            for dim, t in zip(found.indexed, tensors, strict=True):
                refuse_beyond(t, x.shape[dim], from_end=True)
        if any(shares[d][1] == 0 for d in found.dropped):
            return [slice(0, 0)], _nothing_of(value, len(x.shape)) if has_value else value
        if has_value and not (self.by_mask and self.is_single):
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
        mine, beyond = places >= 0, places < 0
        own = []
        for dim, t in zip(dims, spread, strict=True):
            n, offset, size = self.spec.shape[dim], self.spec.local_offset[dim], self.spec.local_shape[dim]
            t = platform.where(t < 0, t + n, t)
            here, inner = own_numbers(t, offset, size, n)
            mine, beyond = mine & here, beyond | is_beyond(t, n)
            own.append(inner)
        mine = mine | beyond  # which the kernels of all ranks then refuse
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
        found = flat[index]
        # Not all frameworks record a choice of nothing, and other ranks' backward waits for this one's.
        return zeros_from(found, [flat]) if 0 in found.shape else found

    def _tensors_of(self, at: list[Any]) -> list[list[Any]]:
        return [entry if isinstance(entry, list) else [entry] for entry in at]


def stretches(own: Shape, shape: Shape) -> bool:
    """Whether a value of shape ``own``, but for leading dims of size 1, stretches to ``shape``."""
    extra = len(own) - len(shape)
    own = own[max(0, extra) :] if math.prod(own[: max(0, extra)]) == 1 else own
    missing = len(shape) - len(own)
    return missing >= 0 and all(n in (1, m) for n, m in zip(own, shape[missing:], strict=True))


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
