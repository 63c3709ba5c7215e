"""Rules of places: subscripts, lookups and writes by number, by torch's own functions; values and gradients, in float64."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor.placements import Partial, Shard
from hp_dtensor.rule_checker import check_rule
from hp_dtensor.rules import RULES
from hp_dtensor.rules.subscript import INDEX, MASK, Template
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from resized import add_resized
from rule_cases import TOLERANCE, Cases, Part, T, case, check, filled, parts, t, truths, whole_numbers

CASES: Cases = {}


def _index(index: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """What stands between the brackets, of a template and its tensors; as it is, of anything else."""
    if not isinstance(index, Template):
        return index
    left = iter(tensors)
    return tuple(
        next(left) if isinstance(e, str) else slice(*e) if isinstance(e, tuple) else e for e in index.entries
    )


def _read(x: torch.Tensor, index: Any, *tensors: torch.Tensor) -> torch.Tensor:
    return x[_index(index, tensors)]


def _written(x: torch.Tensor, index: Any, value: Any, *tensors: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[_index(index, tensors)] = value
    return result


def _put(x: torch.Tensor, index: Any, values: Any, accumulate: bool, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.index_put(x, _index(index, tensors), values, accumulate)


def _template(entries: Any) -> Template:
    def told(e: Any) -> Any:
        if isinstance(e, T):
            return MASK if e.dtype == "bool" else INDEX
        return (e.start, e.stop, e.step) if isinstance(e, slice) else e

    return Template(tuple(map(told, entries)))


def get(x: T, *entries: Any) -> None:
    """A case of ``x[entries]``."""
    case(CASES, "getitem", _read, x, _template(entries), *(e for e in entries if isinstance(e, T)))


def put(x: T, value: Any, *entries: Any) -> None:
    """A case of ``x[entries] = value``."""
    case(CASES, "setitem", _written, x, _template(entries), value, *(e for e in entries if isinstance(e, T)))


ALL = slice(None)


def numbers(*shape: int, below: int) -> T:
    return whole_numbers(*shape, below=below)


get(t(5, 3), 2)
get(t(5, 3), -1, 0)
get(t(5, 3), ALL, 1)
get(t(1, 3), 0)
get(t(8, 3), slice(0, 4))
get(t(8, 3), slice(2, None))
get(t(8, 3), slice(None, None, 2))
get(t(8, 3), slice(None, None, 2), slice(1, 2))
get(t(8, 3), slice(-3, -1), None, ALL, None)
get(t(8, 5), slice(3, 3))
get(t(2, 5, 3), ..., 1)
get(t(2, 5, 3), 1, ..., None, slice(1, 3))
get(t(2, 5, 3), ...)
get(t(2, 5, 3), None)
get(t(5, 3), numbers(4, below=5))
get(t(5, 3), numbers(2, 3, below=5))
get(t(5, 3), numbers(below=5))
get(t(5, 8), ALL, numbers(3, below=8))
get(t(2, 8, 3), 1, ALL, numbers(4, below=3))
get(t(8, 3), slice(1, 7), numbers(4, below=3))
get(t(5, 3, 2), numbers(4, below=5), numbers(4, below=3))
get(t(5, 3, 2), numbers(4, 1, below=5), None, ALL, numbers(1, 3, below=2))
get(t(5, 3, 2), numbers(4, below=5), ALL, numbers(below=2))
get(t(5, 3, 2), None, numbers(2, below=5), ..., None)
get(t(5, 3), truths(5, 3))
get(t(5, 3), truths(5))
get(t(5, 3, 2), ALL, truths(3), slice(0, 1))
get(t(5, 3), truths(5), numbers(below=3))

put(t(5, 3), 2.5, 2)
put(t(5, 3), t(3), 2)
put(t(5, 3), t(5), ALL, 1)
put(t(5, 3), t(), -1, 0)
put(t(8, 3), t(4, 3), slice(2, 6))
put(t(8, 3), t(1, 3), slice(None, None, 3))
put(t(8, 3), t(8, 3), ...)
put(t(8, 3), t(3), ...)
put(t(8, 3), 0.5, slice(1, 2), slice(0, 2))
put(t(8, 3), t(1, 2, 1, 3), slice(1, 3), None, ALL)
put(t(2, 5, 3), t(5), 1, ..., 2)
put(t(5, 3), t(1, 3), slice(4, 4))
put(t(5, 3), t(3), numbers(1, below=5))
put(t(5, 3), t(2, 3), numbers(2, below=5))
put(t(5, 3), t(2, 1), numbers(2, below=5))
put(t(5, 3), 1.5, numbers(2, 2, below=5))
put(t(5, 3, 2), t(3), numbers(3, below=5), ALL, numbers(below=2))
put(t(5, 3, 2), t(2, 3), numbers(2, below=5), ALL, numbers(2, below=2))
put(t(5, 3, 2), t(2, 1), slice(0, 2), numbers(2, 2, below=3), 1)
put(t(5, 8), t(2), 1, numbers(2, below=8))
put(t(5, 3), 7.0, truths(5, 3))
put(t(5, 3), t(), truths(5))
put(t(5, 3, 2), t(1), slice(1, 4), truths(3))
put(t(5, 3), t(4), truths(5, 3))
put(t(5, 3), t(1, 3), truths(5))
put(t(5, 3), t(3), truths(5))
put(t(5, 3, 2), t(3, 1, 2), slice(1, 4), truths(3))

for accumulate in (False, True):
    for shape in ((3,), (2, 1), ()):
        one = numbers(2, below=5)
        case(CASES, "index_put", _put, t(5, 3), _template([one]), t(*shape), accumulate, one)
    case(CASES, "index_put", _put, t(5, 3), _template([truths(5, 3)]), t(4), accumulate, truths(5, 3))
    two = (numbers(4, below=5), numbers(1, below=3))
    case(CASES, "index_put", _put, t(5, 3, 2), _template(two), t(4, 2), accumulate, *two)
two = (numbers(3, 2, below=5), numbers(2, below=3))
case(CASES, "index_put", _put, t(5, 3, 2), _template(two), t(3, 1, 2), True, *two)

case(CASES, "fill", torch.fill, t(5, 3), 2.0)
case(CASES, "fill", torch.fill, t(5, 3), t())
case(CASES, "fill", torch.fill, t(), t())

case(CASES, "index_select", torch.index_select, t(5, 3), 0, numbers(4, below=5))
case(CASES, "index_select", torch.index_select, t(2, 5, 3), -1, numbers(8, below=3))
case(CASES, "index_select", torch.index_select, t(5, 3), 1, numbers(below=3))
case(CASES, "slices_at", lambda x, at, dim: x[:, at] if dim else x[at], t(5, 3), numbers(2, 4, below=3), 1)
case(CASES, "slices_at", lambda x, at, dim: x[:, at] if dim else x[at], t(5, 3), numbers(2, 4, below=5), 0)
case(CASES, "gather", torch.gather, t(5, 3), 0, numbers(2, 3, below=5))
case(CASES, "gather", torch.gather, t(5, 3), 1, numbers(5, 8, below=3))
case(CASES, "gather", torch.gather, t(5, 3, 2), -1, numbers(3, 3, 1, below=2))
case(CASES, "take", torch.take, t(5, 3), numbers(2, 5, below=15))
case(CASES, "take_along_dim", torch.take_along_dim, t(5, 3), numbers(5, 2, below=3), 1)
case(CASES, "take_along_dim", torch.take_along_dim, t(5, 1), numbers(1, 3, below=5), 0)
case(CASES, "take_along_dim", torch.take_along_dim, t(5, 3), numbers(7, below=15))
case(CASES, "embedding", F.embedding, numbers(3, 5, below=8), t(8, 3))
case(CASES, "embedding", F.embedding, numbers(below=5), t(5, 2))
case(CASES, "embedding", F.embedding, numbers(13, below=5), t(5, 3), -2)
case(CASES, "embedding", F.embedding, numbers(8, below=5), t(5, 3), scale_grad_by_freq=True)
case(CASES, "rows_of", torch.embedding, t(8, 3), numbers(3, 5, below=8), 2)

for dim, at in ((0, numbers(2, 3, below=5)), (-1, numbers(5, 2, below=3)), (1, numbers(5, 3, below=3))):
    case(CASES, "scatter", torch.scatter, t(5, 3), dim, numbers(1, 1, below=3), 1.5)
    case(CASES, "scatter_add", torch.scatter_add, t(5, 3), dim, at, t(*at.shape))
    case(CASES, "scatter_add", torch.scatter_add, numbers(5, 3, below=9), dim, at, numbers(5, 8, below=9))
    case(CASES, "scatter_reduce", torch.scatter_reduce, t(5, 3), dim, at, t(*at.shape), "mean")
    case(
        CASES,
        "scatter_reduce",
        torch.scatter_reduce,
        t(5, 3),
        dim,
        at,
        t(*at.shape),
        "sum",
        include_self=False,
    )
case(CASES, "scatter", torch.scatter, t(8, 3), 0, numbers(1, 3, below=8), t(1, 3))
case(CASES, "scatter", torch.scatter, t(8, 3), 1, numbers(8, 1, below=3), t(8, 1))
case(CASES, "scatter", torch.scatter, numbers(8, 3, below=9), 1, numbers(8, 1, below=3), 2, reduce="add")
for dim, at, source in ((0, numbers(4, below=5), t(4, 3)), (1, numbers(2, below=3), t(5, 2))):
    case(CASES, "index_add", torch.index_add, t(5, 3), dim, at, source)
    case(CASES, "index_add", torch.index_add, t(5, 3), dim, at, source, alpha=2)
    case(
        CASES,
        "index_copy",
        torch.index_copy,
        t(5, 3),
        dim,
        numbers(1, below=3),
        T(tuple(1 if i == dim else n for i, n in enumerate((5, 3)))),
    )
    case(CASES, "index_fill", torch.index_fill, t(5, 3), dim, at, 1.5)
    case(CASES, "index_fill", torch.index_fill, t(5, 3), dim, at, t())
    case(CASES, "index_reduce", torch.index_reduce, t(5, 3, low=0.5), dim, at, source, "amax")
case(CASES, "masked_scatter", torch.masked_scatter, t(5, 3), truths(5, 3), t(2, 5))
case(CASES, "masked_scatter", torch.masked_scatter, t(5, 3), truths(3), t(5, 3))

case(CASES, "masked_select", torch.masked_select, t(5, 3), truths(5, 3))
case(CASES, "masked_select", torch.masked_select, t(5, 3), truths(5, 1))
case(CASES, "nonzero", torch.nonzero, truths(5, 3))
case(CASES, "nonzero", torch.nonzero, truths(5, 3), as_tuple=True)
case(CASES, "unique", lambda x: torch.unique(x, return_counts=True), numbers(13, below=5))
case(CASES, "unique", torch.unique_consecutive, numbers(13, below=2))
case(CASES, "bincount", torch.bincount, numbers(13, below=5))
case(CASES, "bincount", lambda x, w, m: torch.bincount(x, w.detach(), m), numbers(13, below=5), t(13), 8)
case(CASES, "histc", torch.histc, t(5, 3), 4, -3, 3)
case(CASES, "histc", torch.histc, t(5, 3), 4)
case(CASES, "one_hot", F.one_hot, numbers(5, 2, below=3), 4)
case(CASES, "one_hot", F.one_hot, numbers(5, below=3))
case(CASES, "isin", torch.isin, numbers(5, 3, below=9), numbers(4, below=9))
case(CASES, "isin", torch.isin, numbers(5, 3, below=9), 2, invert=True)
case(CASES, "isin", torch.isin, 2, numbers(5, below=9))
case(CASES, "searchsorted", lambda b, x: torch.searchsorted(b.sort().values, x), t(5), t(3, 2))
case(CASES, "searchsorted", lambda b, x: torch.searchsorted(b.sort(-1).values, x), t(2, 5), t(2, 3))
case(CASES, "searchsorted", lambda b, x: torch.searchsorted(b.sort().values, x), t(5), 0.5)
case(CASES, "bucketize", lambda x, b: torch.bucketize(x, b.sort().values), t(3, 2), t(5))

case(CASES, "copy_", lambda x, y: x.clone().copy_(y), t(5, 3), t(5, 3))
case(CASES, "copy_", lambda x, y: x.clone().copy_(y), t(5, 3), t(5, 1))
case(CASES, "copy_", lambda x, y: x.clone().copy_(y), t(5, 3), t())
case(CASES, "fill_", lambda x, y: x.clone().fill_(y), t(5, 3), 2.5)
case(CASES, "fill_", lambda x, y: x.clone().fill_(y), t(5, 3), t())
case(CASES, "zero_", lambda x: x.clone().zero_(), t(5, 3))
case(CASES, "equal", torch.equal, t(5, 3), t(5, 3))
case(CASES, "equal", lambda x, y: torch.equal(x, y * 0 + x), t(5, 3), t(5, 3))
case(CASES, "equal", torch.equal, t(5, 3), t(5, 1))
case(CASES, "allclose", torch.allclose, t(5, 3), t(5, 1), 1e-3, 10.0)
case(CASES, "allclose", torch.allclose, t(5, 3), t(3))
case(CASES, "is_same_size", torch.is_same_size, t(5, 3), t(5, 3))


add_resized(CASES)


@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends=("torch", "cuda"))
def test_rule_gives_values_and_gradients_of_the_unsharded_operation(part: Part, world: World) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"index_reduce\(\) is in beta", UserWarning)
        check(CASES[part.name], part)


@distributed(world_size=1, backends=("torch", "cuda"))
def test_a_sum_written_nowhere_into_a_dim_that_two_mesh_dims_cut(world: World) -> None:
    args = filled([t(5, 3), _template([slice(4, 4)]), t(1, 3)])
    for value in ([Shard(1), Partial()], [Partial(), Shard(1)], [Partial(), Partial("avg")]):
        lies = [(Shard(1), Shard(1)), tuple(value)]
        check_rule("setitem", _written, args, lies, (2, 2), tolerance=TOLERANCE)


def test_every_rule_of_these_families_is_checked() -> None:
    families = {"getitem", "setitem", "lookup", "scatter", "search", "fill", "compare"}
    own = {name for name, rule in RULES.items() if rule.plan.__module__.rpartition(".")[2] in families}
    assert own - {case.rule for case in CASES.values()} == set()
