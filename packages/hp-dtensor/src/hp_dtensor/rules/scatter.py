"""Values written or added at places that numbers name: scatter, index_add and their kin.

The dim that the numbers name is joined on the target. What is only added may come in parts: where the numbers are cut, every
rank adds its own, and the results are summands.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor.rules.along import one_place
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Operand, Role, labelled
from hp_dtensor.rules.lookup import check_index
from hp_dtensor.rules.refusals import checked, mean_of_sums
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec


def _scattered(
    x: Spec, dim: Any, index: Any, source: Any, *, adds: bool = False, is_linear: bool = False
) -> Outcome:
    """``x[index[i, j], j] = source[i, j]`` (along dim 0), for an index with the dims of the target.

    ``is_linear`` in target and source together; what ``adds`` is linear in each.
    """
    check_index(index)
    at = one_place(dim, len(x.shape))
    tensors = [x, index, source] if isinstance(source, Spec) else [x, index]
    of_x, of_values = _roles(adds or is_linear)
    if min(len(t.shape) for t in tensors) == 0 and max(len(t.shape) for t in tensors) < 2:
        roles = zip((0, 2, 3), tensors, (of_x, Role.PLAIN, of_values), strict=False)
        operands = [Operand(i, t, ("",) * len(t.shape), role) for i, t, role in roles]
        return labelled(operands, [Labelled(("",) * len(x.shape), x.shape)])
    if any(len(t.shape) != len(x.shape) for t in tensors):
        raise ValueError(
            f"target, index and source need the same number of dims, got shapes {', '.join(str(t.shape) for t in tensors)}"
        )
    if any(i != at and n > m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True))) or any(
        n > m for t in tensors[2:] for n, m in zip(index.shape, t.shape, strict=True)
    ):
        raise ValueError(
            f"index of shape {index.shape} is larger than target {x.shape}"
            + (f" or source {source.shape}" if len(tensors) > 2 else "")
        )
    same = [len({t.shape[i] for t in tensors}) == 1 for i in range(len(x.shape))]
    labels = tuple(f"dim {i}" if same[i] and i != at else "" for i in range(len(x.shape)))
    # Numbers may be dealt to the ranks where each adds to its own summand.
    places = "place" if adds and index.shape[at] == source.shape[at] else ""
    of_source = tuple(places if i == at else label for i, label in enumerate(labels))
    operands = [Operand(0, x, labels, of_x), Operand(2, index, of_source, Role.PLAIN)]
    if isinstance(source, Spec):
        operands.append(Operand(3, source, of_source, of_values))
    return checked(labelled(operands, [Labelled(labels, x.shape)]), {2: x.shape[at]})


def _roles(is_linear: bool) -> tuple[Role, Role]:
    """Of the target and of what is written into it, where the result is linear in both together, or in neither."""
    return (Role.SUMMAND, Role.FACTOR) if is_linear else (Role.PLAIN, Role.PLAIN)


def _value_as_src(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rest = dict(kwargs)
    if "value" in rest and (len(args) == 3 or args[3] is None):
        args = (*args[:3], rest.pop("value"), *args[4:])
    return args, rest


@rule("scatter", params=("input", "dim", "index", ("src", None)), normalise=_value_as_src)
def scatter(x: Any, dim: int, index: Any, src: Any, *, reduce: Any = None) -> Outcome:
    """Written, or (``reduce``) added or multiplied; ``src`` may be a number.

    Sums are reduced first: of the values for a place that is named twice frameworks keep any, and each rank could keep another
    one's share.
    """
    return _scattered(x, dim, index, src)


@rule("scatter_add", params=("input", "dim", "index", "src"))
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Outcome:
    """Added. Linear in target and source."""
    if not isinstance(src, Spec):
        raise ValueError(f"src must be a tensor, got {src!r}")
    return _scattered(x, dim, index, src, adds=True)


@rule("scatter_reduce", params=("input", "dim", "index", "src", "reduce"))
def scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Outcome:
    """Reduced by sum, prod, mean, amax or amin, with or without what was there. Sums and means are linear."""
    adds = reduce == "sum" and include_self
    found = _scattered(x, dim, index, _tensor(src), adds=adds, is_linear=reduce in ("sum", "mean"))
    return mean_of_sums(found) if reduce == "mean" else found


def _along_vector(
    x: Spec,
    dim: Any,
    index: Any,
    source: Any,
    *,
    adds: bool = False,
    is_linear: bool = False,
    from_end: bool = False,
) -> Outcome:
    """The slices of the target that a vector of numbers names. ``adds`` and ``is_linear`` as in :func:`_scattered`.

    ``from_end``: whether negative numbers count from the end.
    """
    check_index(index)
    at = one_place(dim, len(x.shape))
    if len(index.shape) > 1:
        raise ValueError(f"index must be a vector, got shape {index.shape}")
    labels = tuple(f"dim {i}" if i != at else "" for i in range(len(x.shape)))
    places = "place" if adds and index.shape and x.shape else ""
    of_x, of_values = _roles(adds or is_linear)
    operands = [Operand(0, x, labels, of_x), Operand(2, index, (places,) * len(index.shape), Role.PLAIN)]
    if isinstance(source, Spec):
        wanted = (*x.shape[:at], *(index.shape or (1,)), *x.shape[at + 1 :])
        if source.shape != wanted and source.shape not in ((), x.shape[:at] + x.shape[at + 1 :]):
            raise ValueError(f"the source needs the shape {wanted}, got {source.shape}")
        if source.shape == wanted:
            of_source = (*labels[:at], places, *labels[at + 1 :])
        else:  # one slice, or one number, for every place
            of_source = (*labels[:at], *labels[at + 1 :]) if source.shape else ()
            operands[1] = Operand(2, index, ("",) * len(index.shape), Role.PLAIN)
        operands.append(Operand(3, source, of_source, of_values))
    found = labelled(operands, [Labelled(labels, x.shape)])
    return checked(found, {2: x.shape[at]}, from_end=from_end) if x.shape else found


@rule("index_add", params=("input", "dim", "index", "source"))
def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Outcome:
    """Slices added. Linear in target and source."""
    return _along_vector(x, dim, index, _tensor(source), adds=True)


@rule("index_copy", params=("input", "dim", "index", "source"))
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Outcome:
    """Slices written. Sums are reduced first, as by scatter."""
    return _along_vector(x, dim, index, _tensor(source))


@rule("index_reduce", params=("input", "dim", "index", "source", "reduce"))
def index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Outcome:
    """Slices reduced by prod, mean, amax or amin. A mean is linear."""
    found = _along_vector(x, dim, index, _tensor(source), is_linear=reduce == "mean")
    return mean_of_sums(found) if reduce == "mean" else found


@rule("index_fill", params=("input", "dim", "index", "value"))
def index_fill(x: Any, dim: int, index: Any, value: Any) -> Outcome:
    """Slices filled with one value. Linear in target and value, if that is a tensor: a number would be filled in by every rank."""
    if isinstance(value, Spec) and value.shape:
        raise ValueError(f"value must be a number or a 0-d tensor, got shape {value.shape}")
    return _along_vector(x, dim, index, value, is_linear=isinstance(value, Spec), from_end=True)


def _tensor(source: Any) -> Any:
    if not isinstance(source, Spec):
        raise ValueError(f"source must be a tensor, got {source!r}")
    return source


@rule("masked_scatter", params=("input", "mask", "source"))
def masked_scatter(x: Any, mask: Any, source: Any) -> Outcome:
    """The source's elements, one after the other, wherever the mask is true. Linear in target and source.

    What is cut is joined: the order runs over the whole.
    """
    if not (isinstance(mask, Spec) and isinstance(source, Spec)):
        raise ValueError("masked_scatter needs tensors for mask and source")
    roles = (Role.SUMMAND, Role.PLAIN, Role.FACTOR)
    operands = [
        Operand(i, t, ("",) * len(t.shape), role)
        for i, (t, role) in enumerate(zip((x, mask, source), roles, strict=True))
    ]
    shape = broadcast_shape([x.shape, mask.shape])
    return labelled(operands, [Labelled(("",) * len(shape), shape)])
