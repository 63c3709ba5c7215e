"""Deferred initialisation on MindSpore: memory for pieces, and who gives values. Building is in ``registration``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore
from mindspore import ops

from hp_dtensor._mindspore.initializers import check_known, fill
from hp_dtensor._mindspore.registration import RECORDED, replace
from hp_dtensor._mindspore.registration import registering_on as registering_on
from hp_dtensor.rng.places import is_dtensor
from hp_platform import get_platform
from hp_platform.mindspore import _private
from hp_platform.mindspore.device import platform_device


@contextmanager
def draws() -> Iterator[None]:
    """In which ``ops.assign`` writes what was written before: to MindSpore's own that is a view, which it refuses.

    MindSpore's functions cannot be made to draw from the stream; a cell's method calls hp_dtensor.random.
    """

    def assign(variable: Any, value: Any) -> Any:
        return variable.copy_(value) if is_dtensor(variable) else get_platform().copy_(variable, value)

    with ExitStack() as stack:
        replace(stack, mindspore.ops, "assign", assign)
        yield


def local_of(x: Any) -> mindspore.Tensor:
    """The tensor with this rank's values."""
    return x._local if is_dtensor(x) else x


def is_deferred(x: Any) -> bool:
    """Whether it waits for memory."""
    return bool(local_of(x).is_meta)


def device_of_meshes(tensors: Sequence[Any]) -> str:
    """The device of the first DTensor's mesh, else MindSpore's current one."""
    for x in tensors:
        if is_dtensor(x):
            return get_platform().device(x.device_mesh.device_type).current()
    return platform_device(mindspore.get_current_device()[0])


def materialise(x: Any, device: str) -> None:
    """Memory for the piece of this rank, under the same object; floating dtypes hold NaN until they are written."""
    platform, local = get_platform(), local_of(x)
    if is_dtensor(x):
        device = platform.device(x.device_mesh.device_type).current()
    made = platform.empty(tuple(local.shape), local.dtype, device)
    if made.is_floating_point():
        platform.fill_(made, math.nan)
        made = _private.own_copy(
            made
        )  # what was written by index is a view to ops.assign, by which stock cells write
    _private.update_data(local, made)


def is_written(x: Any) -> bool:
    """Whether values were written since :func:`materialise`; not known of a piece without elements and of whole numbers: yes."""
    local = ops.stop_gradient(local_of(x))
    if local.size == 0 or not local.is_floating_point():
        return True
    values = local.astype(mindspore.float32)
    return not bool((values != values).any())


def initialises(module: mindspore.nn.Cell, attribute: str | None) -> bool:
    """Whether the cell itself gives values to its parameter of this name; None: to those of cells in it.

    NotImplementedError, with the way out, for an initializer that is not drawn in pieces.
    """
    if _method(module) is not None:
        return True
    initializer = vars(module).get(RECORDED, {}).get(attribute)
    if initializer is not None:
        check_known(initializer, f"{type(module).__name__}.{attribute}")
    return initializer is not None


def initialiser_of(module: mindspore.nn.Cell, given: Collection[str]) -> Callable[[], None]:
    """What gives its tensors their first values, but for those of names in ``given``: recorded initializers, then its method."""

    def initialise() -> None:
        method = _method(module)
        for name, parameter in get_platform().named_parameters(module, recurse=False, remove_duplicate=False):
            initializer = vars(module).get(RECORDED, {}).get(name)
            if initializer is not None and name not in given:
                fill(parameter, initializer, is_needed=method is None)
        if method is not None:
            method()

    return initialise


def _method(module: mindspore.nn.Cell) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def copy_of(x: Any) -> mindspore.Tensor:
    """This rank's values."""
    return get_platform().clone(ops.stop_gradient(local_of(x)))


def put_back(x: Any, values: mindspore.Tensor) -> None:
    """Write this rank's values."""
    get_platform().copy_(local_of(x), values)
