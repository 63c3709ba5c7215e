"""Of which matrices a parameter is made: blocks of it, by its shape and, where one knows better, by a rule.

====================  =============================================  ==============================================
parameter             matrices                                       usual for
====================  =============================================  ==============================================
``(m, n)``            itself                                         weights ``(out, in)``
``(m, 1, n)``         one, ``(m, n)``                                depthwise convolutions that are stored so
``(e, m, n)``         ``e``, each ``(m, n)``                         experts
4 or 5 dims           one, ``(out, in * k * ...)``                   convolutions ``(out, in, k, ...)``
====================  =============================================  ==============================================

A *rule* says otherwise, for parameters that hold several matrices or are laid out in another way. It is a dict of

* ``"rows"``, ``"cols"``: how a matrix is cut along its rows or columns: a list of sizes, or a number of equal parts. A fused
  projection of 32 heads of queries and 8 of keys and of values, 128 wide, is ``{"rows": [4096, 1024, 1024]}``, and
  ``{"rows": 48}`` makes every head a matrix of its own; gate and up in one are ``{"rows": 2}``; heads of an output projection are
  ``{"cols": 32}``. Of experts each one's matrix is cut; of convolutions columns are counted in input channels.
* ``"layout"``: ``"batch"``, all dims but the last two count matrices; or ``"convolution"``, dim 0 are the rows and all others
  together the columns (needed for one-dimensional convolutions ``(out, in, k)``, which look like experts).

``split``, the option of a group of parameters, is such a rule for all of them; or a dict from patterns of names (as of the shell,
``"*.wqkv.weight"``; the first that fits counts) to rules; or a function ``(name, shape) -> rule or None``. Numbers and names only:
a rule says the same on every rank and in every sharding, since it speaks of the whole parameter. Needs no framework.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

from hp_platform.platform import Platform

Rule: TypeAlias = Mapping[str, Any]
Split: TypeAlias = Rule | Mapping[str, Rule] | Callable[[str, tuple[int, ...]], Rule | None] | None

LAYOUTS: Final = ("batch", "convolution")
RULE_KEYS: Final = ("rows", "cols", "layout")
_MOST_DIMS: Final = 5


@dataclass(frozen=True)
class Matrix:
    """A matrix as a block of the whole parameter, whose elements in row-major order are those of ``(rows, cols)``."""

    offset: tuple[int, ...]
    """Where the block begins along every dim of the parameter."""
    size: tuple[int, ...]
    """The block's size along every dim."""
    rows: int
    cols: int


def matrices_of(shape: Sequence[int], rule: Rule | None = None, *, name: str = "") -> tuple[Matrix, ...]:
    """The matrices of a parameter of the global ``shape``: disjoint blocks that hold every element once, in row-major order.

    A parameter without elements has none. ``name`` is for messages. ValueError for a vector or a number, for more than 5 dims
    without a layout, and for a rule that does not fit the shape.
    """
    sizes = tuple(shape)
    what = f"parameter {name!r}" if name else "a parameter"
    if len(sizes) < 2:
        kind = "a vector" if sizes else "a number"
        raise ValueError(
            f"Muon: {what} of shape {sizes} is {kind}; Muon makes matrices orthogonal and takes parameters of 2 dims and more: "
            "give it to AdamW, as biases, norms and other vectors"
        )
    checked = _checked(rule or {}, what)
    lead, row_dim, col_dim = _dims(sizes, checked.get("layout"), what)
    if 0 in sizes:
        return ()
    row_parts = _parts(checked.get("rows", 1), sizes[row_dim], "rows", sizes, what)
    col_parts = _parts(checked.get("cols", 1), sizes[col_dim], "cols", sizes, what)
    found = []
    for index in itertools.product(*(range(sizes[dim]) for dim in range(lead))):
        for (row, num_rows), (col, num_cols) in itertools.product(row_parts, col_parts):
            offset = [*index, *(0 for _ in sizes[lead:])]
            size = [*(1 for _ in index), *sizes[lead:]]
            offset[row_dim], size[row_dim] = row, num_rows
            offset[col_dim], size[col_dim] = col, num_cols
            found.append(Matrix(tuple(offset), tuple(size), num_rows, math.prod(size) // num_rows))
    return tuple(found)


def rule_for(name: str, shape: Sequence[int], split: Split) -> Rule | None:
    """What ``split`` says of the parameter ``name`` of the global ``shape``; None: nothing, it is made as its shape says.

    ValueError for a split that is none, and for patterns where the parameter has no name.
    """
    if split is None:
        return None
    if callable(split):
        return split(name, tuple(shape))
    if not isinstance(split, Mapping):
        raise ValueError(
            f"split is a {type(split).__name__}; expected a rule (a dict with {', '.join(map(repr, RULE_KEYS))}), a dict from "
            "patterns of names to rules, or a function (name, shape) -> rule or None"
        )
    if not is_by_pattern(split):
        return split
    if not name:
        raise ValueError(
            f"split has patterns of names ({', '.join(map(repr, split))}), and the parameters have none: give the optimizer "
            "(name, parameter) pairs, as model.named_parameters() does"
        )
    return next((rule for pattern, rule in split.items() if fnmatchcase(name, pattern)), None)


def is_by_pattern(split: Split) -> bool:
    """Whether ``split`` is a dict from patterns of names to rules. ValueError for a dict that is half of each."""
    if not isinstance(split, Mapping) or not split:
        return False
    of_rules = [isinstance(value, Mapping) or value is None for value in split.values()]
    if any(of_rules) and not all(of_rules):
        raise ValueError(
            f"split has the keys {', '.join(map(repr, split))}, of which some have a dict and some have not: it is one rule, with "
            f"{', '.join(map(repr, RULE_KEYS))}, or a dict from patterns of names to rules"
        )
    return all(of_rules)


def unmatched_patterns(names: Iterable[str], split: Split) -> list[str]:
    """The patterns of ``split`` that no name meets: misspelt ones, most likely. Empty if it is no dict of patterns."""
    if not is_by_pattern(split):
        return []
    assert isinstance(split, Mapping)
    known = list(names)
    return [pattern for pattern in split if not any(fnmatchcase(name, pattern) for name in known)]


def check_patterns(optimizer: str, splits: Sequence[Split], names: Sequence[Sequence[str]]) -> None:
    """ValueError for a pattern that no name meets: a rule that would never be used. ``splits``, ``names``: of each group; groups that
    have the same split count together.
    """
    for split in splits:
        alike = [own for other, own in zip(splits, names, strict=True) if other is split]
        known = list(itertools.chain.from_iterable(alike))
        unmatched = unmatched_patterns(known, split)
        if unmatched:
            raise ValueError(
                f"{optimizer}: split has {', '.join(map(repr, unmatched))}, which no parameter's name meets; the names are "
                f"{', '.join(known[:3])}{', ...' if len(known) > 3 else ''}: correct the pattern, or leave it out"
            )


def views(platform: Platform, x: Any, matrices: Sequence[Matrix]) -> list[Any]:
    """The matrices of the whole, plain, contiguous tensor ``x``, each ``(rows, cols)``; views of ``x``, nothing is copied."""
    return [platform.reshape(_block(platform, x, each), (each.rows, each.cols)) for each in matrices]


def joined(
    platform: Platform, values: Sequence[Any], shape: Sequence[int], matrices: Sequence[Matrix], like: Any
) -> Any:
    """The tensor of a ``shape`` whose matrices are ``values``, the inverse of :func:`views`; of the dtype of the values.

    One matrix that is all of the parameter is a view of its value; others are copied. ``like`` gives dtype and device where
    there are no values.
    """
    if len(values) == 1:
        return platform.reshape(values[0], tuple(shape))
    first = values[0] if values else like
    whole = platform.empty(tuple(shape), first.dtype, platform.device_of(first))
    for value, matrix in zip(values, matrices, strict=True):
        platform.copy_(_block(platform, whole, matrix), platform.reshape(value, matrix.size))
    return whole


def _block(platform: Platform, x: Any, matrix: Matrix) -> Any:
    for dim, (start, length) in enumerate(zip(matrix.offset, matrix.size, strict=True)):
        if length != x.shape[dim]:
            x = platform.narrow(x, dim, start, length)
    return x


def _checked(rule: Any, what: str) -> Rule:
    if not isinstance(rule, Mapping):
        raise ValueError(
            f"Muon: the rule for {what} is a {type(rule).__name__}; expected a dict with {', '.join(map(repr, RULE_KEYS))}"
        )
    unknown = [key for key in rule if key not in RULE_KEYS]
    if unknown:
        raise ValueError(
            f"Muon: the rule for {what} has {', '.join(map(repr, unknown))}; expected are {', '.join(map(repr, RULE_KEYS))}"
        )
    return rule


def _dims(sizes: tuple[int, ...], layout: str | None, what: str) -> tuple[int, int, int]:
    """How many leading dims count matrices, and along which dim rows and columns are cut."""
    last = len(sizes) - 1
    if layout not in (None, *LAYOUTS):
        raise ValueError(
            f"Muon: the layout of {what} is {layout!r}; expected {' or '.join(map(repr, LAYOUTS))}, or none at all"
        )
    if layout == "batch" or len(sizes) == 2 or (layout is None and len(sizes) == 3 and sizes[1] != 1):
        return last - 1, last - 1, last
    if layout is None and len(sizes) == 3:
        return 0, 0, last
    if layout is None and len(sizes) > _MOST_DIMS:
        raise ValueError(
            f"Muon: {what} of shape {sizes} has {len(sizes)} dims; up to {_MOST_DIMS} are understood: say which matrices it holds, by "
            "split={'layout': 'batch'} or 'convolution'"
        )
    return 0, 0, 1


def _parts(given: Any, size: int, key: str, sizes: tuple[int, ...], what: str) -> list[tuple[int, int]]:
    """Start and length of the parts of a dim of ``size``."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1 or size % given:
            raise ValueError(
                f"Muon: {what} of shape {sizes} has {size} {key}, which cannot be cut into {given} equal parts: give a divisor, or "
                "a list of sizes"
            )
        lengths = [size // given] * given
    else:
        lengths = _lengths(given, key, what)
        if sum(lengths) != size:
            raise ValueError(
                f"Muon: {what} of shape {sizes} has {size} {key}, and the rule's {lengths} make up {sum(lengths)}: give sizes of "
                "the whole parameter, not of a shard, that make up all of it"
            )
    starts = itertools.accumulate(lengths, initial=0)
    return list(zip(starts, lengths, strict=False))


def _lengths(given: Any, key: str, what: str) -> list[int]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in given):
        raise ValueError(
            f"Muon: {key!r} of the rule for {what} is {given!r}; expected a number of equal parts, or a list of sizes of at least 1"
        )
    return list(given)
