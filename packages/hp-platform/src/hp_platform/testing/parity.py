"""Comparing a parallel program's values with those of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_platform.platform import get_platform


def assert_parity(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    name: str = "value",
) -> None:
    """Raise AssertionError unless ``|actual - expected| <= atol + rtol * |expected|`` everywhere, or with ``exact`` bit by bit.

    Both are tensors of the platform, sharded tensors (with ``full_tensor()``), numpy arrays, numbers, None, or equally
    nested dicts, lists and tuples of them. Shapes and dtypes must be equal; NaN is refused on either side, and infinities
    must be equal. Whole numbers and booleans are always compared exactly. Tolerances have no default: say in a comment at
    the call where yours comes from. One of them alone means that the other is 0.

    The message says which entry differs (``name`` and the path into the nest), by how much at most and where, shapes and
    dtypes. ValueError if neither tolerances nor ``exact=True`` are given, or both.

    Communication: that of ``full_tensor()`` for sharded tensors, so that all ranks must call; else none.
    """
    if exact and (rtol is not None or atol is not None):
        raise ValueError("exact=True takes no tolerances: give either it or rtol and atol")
    if not exact and rtol is None and atol is None:
        raise ValueError(
            "assert_parity has no default tolerance: give rtol and atol, or exact=True if only data moves"
        )
    _compare(actual, expected, 0.0 if rtol is None else rtol, 0.0 if atol is None else atol, exact, name)


def _compare(actual: Any, expected: Any, rtol: float, atol: float, exact: bool, name: str) -> None:
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        if list(actual) != list(expected) and set(actual) != set(expected):
            only_actual = sorted(map(repr, set(actual) - set(expected)))
            only_expected = sorted(map(repr, set(expected) - set(actual)))
            raise AssertionError(
                f"{name}: keys differ; only in actual: {', '.join(only_actual) or 'none'}; "
                f"only in expected: {', '.join(only_expected) or 'none'}"
            )
        for key in expected:
            _compare(actual[key], expected[key], rtol, atol, exact, f"{name}[{key!r}]")
    elif isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            raise AssertionError(f"{name}: actual has {len(actual)} entries, expected has {len(expected)}")
        for index, (x, y) in enumerate(zip(actual, expected, strict=True)):
            _compare(x, y, rtol, atol, exact, f"{name}[{index}]")
    elif actual is None or expected is None:
        if actual is not expected:
            raise AssertionError(f"{name}: actual is {_kind(actual)}, expected is {_kind(expected)}")
    else:
        _compare_arrays(_array(actual, name), _array(expected, name), rtol, atol, exact, name)


def _compare_arrays(
    actual: tuple[Any, str], expected: tuple[Any, str], rtol: float, atol: float, exact: bool, name: str
) -> None:
    import numpy as np

    (x, x_dtype), (y, y_dtype) = actual, expected
    facts = f"actual {x_dtype}{list(x.shape)}, expected {y_dtype}{list(y.shape)}"
    if x.shape != y.shape:
        raise AssertionError(f"{name}: shapes differ: {facts}")
    if x_dtype != y_dtype:
        raise AssertionError(f"{name}: dtypes differ: {facts}")
    is_inexact = x.dtype.kind in "fc"
    if is_inexact:
        for side, values in (("actual", x), ("expected", y)):
            if np.isnan(values).any():
                where = tuple(int(i) for i in np.argwhere(np.isnan(values))[0])
                raise AssertionError(
                    f"{name}: {side} is NaN in {int(np.isnan(values).sum())} of {values.size} elements, first at {where}; {facts}"
                )
    if not is_inexact:
        differ = x != y
        rule = "exactly"
    elif exact:
        differ = _bytes_differ(x, y)
        rule = "bit by bit"
    else:
        differ = _outside(_wide(x), _wide(y), rtol, atol)
        rule = f"within rtol={rtol:g}, atol={atol:g}"
    if not differ.any():
        return
    raise AssertionError(f"{name}: not equal {rule}; {_worst(x, y, differ)}; {facts}")


def _outside(x: Any, y: Any, rtol: float, atol: float) -> Any:
    import numpy as np

    with np.errstate(invalid="ignore"):
        close = np.abs(x - y) <= atol + rtol * np.abs(y)
    # An infinite expected value would make any tolerance infinite.
    return (x != y) & ~(close & np.isfinite(x) & np.isfinite(y))


def _bytes_differ(x: Any, y: Any) -> Any:
    """Elementwise; -0.0 and 0.0 are equal numbers, but not equal bits."""
    import numpy as np

    width = x.dtype.itemsize
    x_bytes, y_bytes = (np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, width) for a in (x, y))
    return (x_bytes != y_bytes).any(axis=1).reshape(x.shape)


def _wide(x: Any) -> Any:
    """Wide enough that computing the difference adds nothing to it."""
    import numpy as np

    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _worst(x: Any, y: Any, differ: Any) -> str:
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        absolute = np.abs(_wide(x) - _wide(y))
        relative = absolute / np.abs(_wide(y))
    # inf - inf is NaN, which max() would hide behind; what does not differ shall not win.
    absolute = np.where(differ, np.where(np.isnan(absolute), np.inf, absolute), -1.0)
    relative = np.where(differ, np.where(np.isnan(relative), np.inf, relative), -1.0)
    index = np.unravel_index(int(np.argmax(absolute)), x.shape)
    where = tuple(int(i) for i in index)
    return (
        f"{int(differ.sum())} of {x.size} elements differ; largest difference {absolute.max():.6g} at {where} "
        f"(actual {x[index].item()!r}, expected {y[index].item()!r}), largest relative difference {relative.max():.6g}"
    )


def _array(value: Any, name: str) -> tuple[Any, str]:
    """The value as a numpy array, and the name of its own dtype."""
    import numpy as np

    full = getattr(value, "full_tensor", None)
    if callable(full):
        value = full()
    if isinstance(value, (bool, int, float, complex, np.ndarray, np.generic)):
        array = np.asarray(value)
        return array, array.dtype.name
    platform = get_platform()
    if platform.is_tensor(value):
        return platform.to_numpy(platform.detach(value)), platform.dtype_name(value.dtype)
    raise AssertionError(
        f"{name}: cannot compare {_kind(value)}: expected a tensor, an array, a number, None or a nest of them"
    )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
