"""Blocks in which MindSpore's cells are built without memory, or on another device.

[Note: recorded initializers] A stock cell has no method that initialises it: it makes ``Parameter(initializer(...))``, and
MindSpore fills that at once. In a block it does not (MindSpore's own switch for delayed initialisation); the cell keeps the
initializer by the name of the parameter, so that it outlives whatever takes the parameter's place when the model is sharded.
Some stock cells fill a parameter with one number instead (``mint.nn.LayerNorm``): the number is kept as ``Constant``. Of other
cells it is not: what a cell of the user has from ``empty`` may look like one number, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore
from mindspore import mint
from mindspore.common.initializer import Constant

from hp_dtensor.rng.places import is_dtensor
from hp_platform import get_platform
from hp_platform.mindspore.device import framework_device

RECORDED = "_hp_dtensor_initializers"
"""Attribute of a cell: name of a parameter -> its initializer. See [Note: recorded initializers]."""
_insert, _register, _assign = (
    mindspore.nn.Cell.insert_param_to_cell,
    mindspore.nn.Cell.register_buffer,
    mindspore.ops.assign,
)


@contextmanager
def registering_on(device: Any, include_buffers: bool) -> Iterator[None]:
    """See :func:`hp_dtensor.init.contexts.init_on_device`. Of nested blocks the innermost one's functions stand."""
    if not isinstance(device, str):
        raise ValueError(f"a device is a name like 'meta' or 'cpu', got {device!r}")
    framework_device(device)

    def insert(cell: Any, param_name: str, param: Any, check_name_contain_dot: bool = True) -> None:
        _insert(cell, param_name, param, check_name_contain_dot)
        if isinstance(param, mindspore.Parameter) and not is_dtensor(param):
            _record(cell, param_name, param)
            _move(param, device)

    def register(cell: Any, name: str, tensor: Any, *args: Any, **kwargs: Any) -> None:
        _register(cell, name, tensor, *args, **kwargs)
        if isinstance(tensor, mindspore.Tensor) and not is_dtensor(tensor):
            _move(tensor, device)

    with ExitStack() as stack:
        replace(stack, mindspore.Parameter, "init_param", device != "meta")
        replace(stack, mindspore.nn.Cell, "insert_param_to_cell", insert)
        replace(stack, mindspore.ops, "assign", _assign_unless_meta)
        if include_buffers:
            replace(stack, mindspore.nn.Cell, "register_buffer", register)
        yield


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Let ``owner.name`` be ``value`` until the block ends."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _record(cell: Any, name: str, parameter: mindspore.Parameter) -> None:
    recorded = vars(cell).setdefault(RECORDED, {})
    recorded.pop(name, None)
    if parameter.has_init:
        recorded[name] = parameter.init_mode.init
        # Else MindSpore would initialise it at the cell's first call.
        parameter.init_mode = parameter.init = None
    elif type(cell).__module__.partition(".")[0] == "mindspore" and not parameter.is_meta and parameter.size:
        values = get_platform().to_numpy(parameter)
        number = values.flat[0]
        if (values == number).all():
            recorded[name] = Constant(number.item())


def _move(x: mindspore.Tensor, device: str) -> None:
    """The same object on another device."""
    platform = get_platform()
    if x.is_meta:
        return
    if device == "meta":
        platform.set_data_(x, mint.empty(x.shape, dtype=x.dtype, device="meta"))
        return
    moved = platform.to_device(x, device)
    if moved is not x:
        platform.set_data_(x, moved)


def _assign_unless_meta(variable: Any, value: Any) -> Any:
    """What has no memory takes no values: a cell that initialises itself when it is built will do so again later."""
    return variable if variable.is_meta else _assign(variable, value)
