"""Whether two tensors agree: one answer for the whole, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor import across
from hp_dtensor.rules.elementwise import pointwise
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform


def _agreed(x: Spec, y: Spec) -> Outcome:
    """Every rank compares its pieces; that all agree costs one all-reduce of a number per mesh dim that cuts."""
    found = pointwise((x, y))
    assert found.output is not None
    lies = make_spec(x.mesh, found.output, found.shape)
    dims = across.cutting(lies, range(len(found.shape)))

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(a: Any, b: Any, *rest: Any, **kwargs: Any) -> bool:
            platform = get_platform()
            answer = platform.full((1,), int(kernel(a, b, *rest, **kwargs)), "int32", platform.device_of(a))
            return bool(platform.to_numpy(across.reduced(answer, lies, dims, "min"))[0])

        return run

    return Outcome(found.inputs, None, around=around)


@rule("equal", params=("input", "other"))
def equal(x: Any, y: Any) -> Outcome:
    """Same shape, same values."""
    _check_both(x, y)
    if x.shape != y.shape:
        return Outcome((None, None), None, run=lambda *_: False)
    return _agreed(x, y)


@rule("allclose", params=("input", "other", ("rtol", 1e-5), ("atol", 1e-8), ("equal_nan", False)))
def allclose(x: Any, y: Any, *options: Any) -> Outcome:
    """Same values within ``atol + rtol * |other|``."""
    _check_both(x, y)
    return _agreed(x, y)


@rule("is_same_size", params=("input", "other"))
def is_same_size(x: Any, y: Any) -> Outcome:
    """Same shape."""
    _check_both(x, y)
    return Outcome((None, None), None, run=lambda *_: x.shape == y.shape)


def _check_both(x: Any, y: Any) -> None:
    if not (isinstance(x, Spec) and isinstance(y, Spec)):
        raise ValueError("both must be tensors")
