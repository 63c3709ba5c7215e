"""The methods of mindspore.Tensor on DTensors: each by its rule, or refused by name.

They do not all arrive at the class's ``__fallback__`` (``x[0]``, ``x.T`` and ``x.asnumpy()`` do not), so each is overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore

from hp_dtensor import _names
from hp_dtensor._mindspore.primitives import RIGHT
from hp_dtensor.base import DTensorBase
from hp_dtensor.dispatch import Dispatch
from hp_dtensor.errors import no_rule
from hp_dtensor.rules import RULES
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_platform import _process

_BELOW = """
    __array__ __getitem__ __getstate__ __reduce__ __reduce_ex__ __round__ __setitem__ _convert_scalar_ _data_ptr _flush_from_cache
    _getitem _getitem_origin _item _load _numpy_non_blocking _offload _retain_grad _setitem _setitem_origin
    _shared_host_memory_with_device_ _tolist _update_data
"""
"""What reads or writes a tensor's memory under names that are not public."""
_PROPERTIES = ("nbytes", "strides")
"""Those that hand out memory, or speak of it."""


def define_methods(tensor_class: Any, dispatch: Dispatch) -> None:
    """Give ``tensor_class`` a method for every one of mindspore.Tensor that it has not by itself."""
    rules = {name: RULES[rule] for rule, name in (*_names.functions(), *_names.methods())}
    for rule, name in _names.in_place():
        functional = getattr(mindspore.Tensor, _names.functional_name(name), None)
        if functional is not None:
            rules[name] = RULES[rule].writing(functional)
    bases = tensor_class.__mro__
    own = {name for base in bases[: bases.index(mindspore.Tensor)] for name in vars(base)}
    public = {name for name in dir(mindspore.Tensor) if not name.startswith("_")}
    for name in public | set(rules) | set(_BELOW.split()):
        attribute = getattr(mindspore.Tensor, name, None)
        if name in own or not callable(attribute):
            continue
        method = _method(name, rules[name], dispatch) if name in rules else _refusal(name)
        setattr(tensor_class, name, method)
    for name in _PROPERTIES:
        setattr(tensor_class, name, property(_refusal(name)))


def dtensors(nest: Any) -> Iterator[Any]:
    """The DTensors in tuples, lists and dicts."""
    if isinstance(nest, DTensorBase):
        yield nest
    elif isinstance(nest, (tuple, list, dict)):
        for entry in nest.values() if isinstance(nest, dict) else nest:
            yield from dtensors(entry)


def _method(name: str, rule: Any, dispatch: Dispatch) -> Callable[..., Any]:
    function = RIGHT.get(name, getattr(mindspore.Tensor, name))

    def method(*args: Any, **kwargs: Any) -> Any:
        return dispatch(rule, function, args, kwargs)

    method.__name__, method.__doc__ = name, function.__doc__
    return method


def _refusal(name: str) -> Callable[..., Any]:
    function = getattr(mindspore.Tensor, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        if _process.open_modes.count and is_skipped(function):
            return on_locals(function, args, kwargs)
        raise no_rule(f"Tensor.{name}", [x._spec for x in dtensors((args, kwargs))])

    refused.__name__ = name
    return refused
