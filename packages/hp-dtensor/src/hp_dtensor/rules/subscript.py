"""What stands between the brackets of ``x[...]``: brought into a hashable form, and told apart by dims.

The form is a template and the tensors of it in their order. In a template a tensor is ``"index"`` or ``"mask"`` (truth
values), a slice a tuple of three, an int itself, a new dim None, and Ellipsis itself. Masks are no numbers: their elements
say how large the result is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.slices import Part
from hp_dtensor.spec import Spec
from hp_platform import get_platform

INDEX = "index"
MASK = "mask"


@dataclass(frozen=True)
class Template:
    """A subscript without its tensors."""

    entries: tuple[Any, ...]


def normalised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(x, index, *value)`` as ``(x, template, *value, *tensors)``."""
    x, index, *value = args
    if isinstance(index, Template):
        return args, kwargs
    entries = index if isinstance(index, tuple) else (index,)
    template, tensors = [], []
    for entry in entries:
        kind, tensor = _entry(entry, x)
        template.append(kind)
        if tensor is not None:
            tensors.append(tensor)
    return (x, Template(tuple(template)), *value, *tensors), kwargs


def _entry(entry: Any, x: Any) -> tuple[Any, Any]:
    platform = get_platform()
    if entry is None or entry is Ellipsis:
        return entry, None
    if isinstance(entry, slice):
        return tuple(
            None if n is None else operator.index(n) for n in (entry.start, entry.stop, entry.step)
        ), None
    if isinstance(entry, bool):
        raise ValueError(f"a single truth value as an index is not taken: use x[None] for True, got {entry}")
    if not platform.is_tensor(entry):
        if hasattr(entry, "__index__") and not getattr(entry, "shape", ()):
            return operator.index(entry), None
        entry = _as_tensor(entry, x)
    return entry_kind(entry), entry


def entry_kind(tensor: Any) -> str:
    """Whether a tensor says places or is a mask."""
    name = get_platform().dtype_name(tensor.dtype) if get_platform().is_tensor(tensor) else "no dtype"
    if name in ("bool", "uint8"):
        return MASK
    if not name.startswith(("int", "uint")):
        raise ValueError(f"an index must be of whole numbers or truth values, got a tensor of {name}")
    return INDEX


def _as_tensor(entry: Any, x: Any) -> Any:
    """A list or an array of ints or truth values, where the elements of ``x`` are."""
    import numpy as np

    values = np.asarray(entry)
    if values.size == 0:
        values = values.astype("int64")
    if values.dtype != bool and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"an index is an int, a slice, None, ..., a tensor or a list of ints, got {entry!r}")
    platform = get_platform()
    own = getattr(x, "_local", x)
    return platform.tensor(values, "bool" if values.dtype == bool else "int64", platform.device_of(own))


@dataclass(frozen=True)
class Subscript:
    """A template that has met a tensor's shape."""

    parts: tuple[Part, ...]
    """What is taken of each dim of the tensor; of a dim that a tensor indexes, all of it."""
    dropped: frozenset[int]
    """Dims of the tensor that an int takes away."""
    entries: tuple[Any, ...]
    """From left to right: a dim of the tensor, None for a new one, or ``("tensor", i, first dim, number of dims)``."""
    kinds: tuple[str, ...]
    """For each tensor, INDEX or MASK."""

    @property
    def order(self) -> list[Any]:
        """The entries that come out: all but dropped dims."""
        return [e for e in self.entries if not isinstance(e, int) or e not in self.dropped]

    @property
    def has_masks(self) -> bool:
        """Whether the size of the result is in the values."""
        return MASK in self.kinds

    @property
    def indexed(self) -> list[int]:
        """The dims that tensors index."""
        return [d for e in self.order if isinstance(e, tuple) for d in range(e[2], e[2] + e[3])]

    def place(self) -> int:
        """Where in the result the dims of the tensors are: where they stand if side by side, else in front."""
        at = [i for i, e in enumerate(self.order) if isinstance(e, tuple)]
        return at[0] if at[-1] - at[0] == len(at) - 1 else 0

    def plain(self) -> list[Any]:
        """What comes out, but for the tensors' dims."""
        return [e for e in self.order if not isinstance(e, tuple)]


def parsed(x: Spec, template: Template, tensors: Sequence[Spec]) -> Subscript:
    """IndexError where the template does not fit."""
    ndims, entries = iter(tensors), template.entries
    widths = [_width(entry, ndims) for entry in entries]
    missing = len(x.shape) - sum(widths)
    dots = entries.count(Ellipsis)
    if missing < 0 or dots > 1:
        what = "two ellipses" if dots > 1 else f"an index for {sum(widths)} dims"
        raise IndexError(f"{what} does not fit a tensor with {len(x.shape)} dims")
    if not dots:
        entries, widths = (*entries, Ellipsis), [*widths, 0]
    parts: list[Part] = []
    dropped: set[int] = set()
    met: list[Any] = []
    kinds: list[str] = []
    left = iter(tensors)
    for entry, width in zip(entries, widths, strict=True):
        dim = len(parts)
        if entry is None:
            met.append(None)
        elif entry is Ellipsis:
            met.extend(range(dim, dim + missing))
            parts.extend(Part(0, 1, n) for n in x.shape[dim : dim + missing])
        elif isinstance(entry, str):
            _check_mask(entry, next(left), x, dim)
            met.append(("tensor", len(kinds), dim, width))
            kinds.append(entry)
            parts.extend(Part(0, 1, n) for n in x.shape[dim : dim + width])
        elif isinstance(entry, tuple):
            met.append(dim)
            parts.append(_part_of(slice(*entry), x.shape[dim]))
        else:
            n = x.shape[dim]
            if not -n <= entry < n:
                raise IndexError(f"index {entry} is out of range for dim {dim} of size {n}")
            dropped.add(dim)
            met.append(dim)
            parts.append(Part(entry % n, 1, 1))
    return Subscript(tuple(parts), frozenset(dropped), tuple(met), tuple(kinds))


def _width(entry: Any, tensors: Any) -> int:
    """How many dims of the tensor an entry takes."""
    if entry is None or entry is Ellipsis:
        return 0
    if isinstance(entry, str):
        tensor = next(tensors)
        return len(tensor.shape) if entry == MASK else 1
    return 1


def _check_mask(kind: str, mask: Spec, x: Spec, dim: int) -> None:
    size = x.shape[dim : dim + len(mask.shape)]
    if kind == MASK and (mask.shape != size or not mask.shape):
        raise IndexError(
            f"a mask of shape {mask.shape} does not fit dims of sizes {size} of a tensor of shape {x.shape}"
        )


def _part_of(taken: slice, n: int) -> Part:
    if taken.step is not None and taken.step < 1:
        raise ValueError(f"a slice must go forward, got step {taken.step}: use flip()")
    start, stop, step = taken.indices(n)
    return Part(start, step, len(range(start, stop, step)))


def common_shape(found: Subscript, tensors: Sequence[Spec]) -> tuple[int, ...]:
    """Of the tensors of a subscript without masks."""
    return broadcast_shape([x.shape for x in tensors]) if tensors else ()
