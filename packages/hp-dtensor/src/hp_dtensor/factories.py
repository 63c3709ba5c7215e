"""DTensors of constants, ranges and random numbers, of which every rank makes its piece only. No function communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.placements import REPLICATE, Placement
from hp_dtensor.rng.making import size_of
from hp_dtensor.rng.places import Generator, refuse_partial, region_of
from hp_dtensor.rng.writing import drawn
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform
from hp_platform.draws import Distribution

if TYPE_CHECKING:
    from hp_platform import DeviceMesh

Placements = Sequence[Placement] | None


def zeros(
    *size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """A DTensor of zeros.

    Args:
        size: the global shape, as ints or one sequence.
        device_mesh: default: the current mesh (``with mesh:``); the tensor lies on its kind of device.
        placements: one per mesh dim; default: Replicate everywhere. No Partial (ValueError).
        dtype: default float32.
        requires_grad: whether the result is a leaf that gathers its gradient.

    ValueError for arguments that do not fit, RuntimeError on a rank outside of the mesh, or without any mesh.
    """
    return full(
        size,
        0,
        device_mesh=device_mesh,
        placements=placements,
        dtype=dtype or "float32",
        requires_grad=requires_grad,
    )


def ones(
    *size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """A DTensor of ones; arguments as of :func:`zeros`."""
    return full(
        size,
        1,
        device_mesh=device_mesh,
        placements=placements,
        dtype=dtype or "float32",
        requires_grad=requires_grad,
    )


def full(
    size: Any,
    fill_value: Any,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """A DTensor with one value everywhere; default dtype: bool, int64 or float32, as the value is. Else as :func:`zeros`."""
    spec = _spec_of(size_of(size if isinstance(size, tuple) else (size,)), device_mesh, placements)
    kind = "bool" if isinstance(fill_value, bool) else "int64" if isinstance(fill_value, int) else "float32"
    local = get_platform().full(spec.local_shape, fill_value, dtype or kind, _device_of(spec))
    return _made(local, spec, requires_grad)


def empty(
    *size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """A DTensor of uninitialised memory; arguments as of :func:`zeros`."""
    spec = _spec_of(size_of(size), device_mesh, placements)
    return _made(
        get_platform().empty(spec.local_shape, dtype or "float32", _device_of(spec)), spec, requires_grad
    )


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """A DTensor ``start, start + step, ...`` below ``end`` (above, for a negative step); ``arange(end)`` begins at 0.

    Default dtype: int64 if all three are ints, else float32. Element i is ``start + i * step`` in float64, rounded once. Else as
    :func:`zeros`. ValueError for a step of 0 or away from ``end``.
    """
    import numpy as np

    first, last = (0, start) if end is None else (start, end)
    if step == 0 or (last - first) / step < 0:
        raise ValueError(f"arange from {first} to {last} by {step}: the step must lead from one to the other")
    spec = _spec_of((math.ceil((last - first) / step),), device_mesh, placements)
    index = np.arange(spec.local_offset[0], spec.local_offset[0] + spec.local_shape[0])
    whole = all(isinstance(x, int) for x in (first, last, step))
    local = get_platform().tensor(
        index * step + first, dtype or ("int64" if whole else "float32"), _device_of(spec)
    )
    return _made(local, spec, requires_grad)


def rand(
    *size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator = None,
) -> Any:
    """A DTensor of uniform numbers in ``[0, 1)``: the values of ``hp_dtensor.random.rand(size)`` for any placements.

    ``generator``: a :class:`hp_dtensor.random.RandomStream`; default: the stream that ``manual_seed`` seeds. Else as
    :func:`zeros`.
    """
    spec = _spec_of(size_of(size), device_mesh, placements)
    distribution = Distribution.uniform(0.0, 1.0, get_platform().dtype_name(dtype or "float32"))
    return _made(drawn(distribution, region_of(spec), _device_of(spec), generator), spec, requires_grad)


def randn(
    *size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator = None,
) -> Any:
    """A DTensor of standard normal numbers: the values of ``hp_dtensor.random.randn(size)``. Else as :func:`rand`."""
    spec = _spec_of(size_of(size), device_mesh, placements)
    distribution = Distribution.normal(0.0, 1.0, get_platform().dtype_name(dtype or "float32"))
    return _made(drawn(distribution, region_of(spec), _device_of(spec), generator), spec, requires_grad)


def _spec_of(shape: tuple[int, ...], device_mesh: DeviceMesh | None, placements: Placements) -> Spec:
    from hp_dtensor.creation import check_mesh
    from hp_platform import get_current_mesh

    mesh: Any = get_current_mesh() if device_mesh is None else device_mesh
    check_mesh(mesh)
    spec = make_spec(mesh, (REPLICATE,) * len(mesh.shape) if placements is None else placements, shape)
    refuse_partial(spec, "making")
    return spec


def _device_of(spec: Spec) -> str:
    return get_platform().device(spec.mesh.device_type).current()


def _made(local: Any, spec: Spec, requires_grad: bool) -> Any:
    from hp_dtensor.native import DTensor

    made = DTensor._wrap(local, spec)
    return made.requires_grad_(True) if requires_grad else made
