"""DTensor on MindSpore: a subclass around a plain local tensor, caught above autograd.

The wrapper itself is an empty tensor, so that what is not caught finds no values. Functions arrive at ``__fallback__``, by
the names of their primitives. Methods do not all arrive (``x[0]``, ``x.T`` and ``x.asnumpy()`` do not), so every public
method of Tensor is overridden: by its rule, or by a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore

from hp_dtensor import _names
from hp_dtensor._mindspore.checkpoint import CheckpointMethods
from hp_dtensor._mindspore.parameter import ParameterMethods
from hp_dtensor._mindspore.spellings import SPELLINGS
from hp_dtensor.dispatch import build_dispatch
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import no_rule
from hp_dtensor.rules import RULES
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_dtensor.spec import Spec
from hp_platform import _process, get_platform

_EMPTY = mindspore.Tensor([])


class DTensor(ParameterMethods, DTensorMethods, CheckpointMethods, mindspore.Tensor):
    """See :class:`hp_dtensor.dtensor.DTensorMethods`."""

    def __new__(cls, dtensor: DTensor) -> DTensor:
        """A leaf over the same local tensor: what ``mindspore.Parameter(dtensor)`` is made of."""
        x = mindspore.Tensor._make_subclass(cls, _EMPTY)
        x._local, x._spec = get_platform().detach(dtensor._local), dtensor._spec
        x._marks, x._grad_dtensor = None, None
        return x

    @staticmethod
    def _wrap(local: mindspore.Tensor, spec: Spec) -> DTensor:
        x = mindspore.Tensor._make_subclass(DTensor, _EMPTY)
        x._local, x._spec, x._marks, x._grad_dtensor = local, spec, None, None
        return x

    @classmethod
    def __fallback__(cls, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of MindSpore that meets a DTensor."""
        spelled = SPELLINGS.get(func.name)
        if spelled is not None:
            return spelled(func, args, kwargs, dispatch)
        rule, function = TABLE.get(func.name), _RIGHT.get(func.name, func)
        if rule is not None and args and isinstance(args[0], mindspore.ops.Primitive):
            # A primitive that is an object comes with itself, its name and its arguments.
            primitive, name, args = args
            function = _RIGHT.get(func.name, lambda *local: func(primitive, name, local))
        if rule is not None:
            return dispatch(rule, function, args, kwargs)
        if _process.open_modes.count and is_skipped(func):
            return on_locals(func, args, kwargs)
        if func.name == "StopGradient":  # what detaching ends in; its tensor comes in a tuple
            return next(_tensors(args)).detach()
        raise no_rule(func.name, [x._spec for x in _tensors((args, kwargs or {}))])

    size = property(
        DTensorMethods.numel, doc="Number of elements of the whole: MindSpore's meaning of the name."
    )
    T = property(lambda x: x.t(), doc="The transpose of a matrix.")
    mT = property(lambda x: x.transpose(-2, -1), doc="The last two dims swapped.")  # noqa: N815 (torch's name)
    nelement = DTensorMethods.numel
    ndimension = DTensorMethods.dim

    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating one."""
        return bool(self._local.is_floating_point())

    def _write(self, value: mindspore.Tensor) -> None:
        platform, own = get_platform(), self._local
        if platform.is_grad_enabled() and (platform.requires_grad(own) or platform.requires_grad(value)):
            raise ValueError(
                "mindspore cannot record writing into a DTensor for backward: write under no_grad(), or make a new tensor"
            )
        platform.copy_(own, value)

    def copy(self) -> DTensor:
        """Another tensor with the same values."""
        return self.clone()


dispatch = build_dispatch(DTensor, DTensor._wrap)

_RIGHT: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("MatMul", "MatMulExt", "matmul", "__matmul__"), get_platform().matmul
)
_RIGHT["clone"] = get_platform().clone
"""What runs instead of MindSpore's own: its products of small shapes have wrong gradients, and clone has no kernel on cpu."""

TABLE = {name: RULES[rule] for rule, name in _names.primitives()}
"""Name of a primitive -> its rule."""


def _method(name: str, rule: Any) -> Callable[..., Any]:
    function = _RIGHT.get(name, getattr(mindspore.Tensor, name))

    def method(*args: Any, **kwargs: Any) -> Any:
        return dispatch(rule, function, args, kwargs)

    method.__name__, method.__doc__ = name, function.__doc__
    return method


def _refusal(name: str) -> Callable[..., Any]:
    function = getattr(mindspore.Tensor, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        if _process.open_modes.count and is_skipped(function):
            return on_locals(function, args, kwargs)
        raise no_rule(f"Tensor.{name}", [x._spec for x in _tensors((args, kwargs))])

    refused.__name__ = name
    return refused


_BELOW = "__array__ __contains__ __deepcopy__ __getitem__ __getstate__ __index__ __iter__ __reduce__ __reduce_ex__ __round__"
_BELOW_TOO = "__setitem__ _data_ptr _getitem _item _load _offload _setitem _tolist _update_data"


def _define_methods() -> None:
    rules = {name: RULES[rule] for rule, name in (*_names.functions(), *_names.methods())}
    for rule, name in _names.in_place():
        functional = getattr(mindspore.Tensor, _names.functional_name(name), None)
        if functional is not None:
            rules[name] = RULES[rule].writing(functional)
    own = {name for base in DTensor.__mro__[: DTensor.__mro__.index(mindspore.Tensor)] for name in vars(base)}
    public = {name for name in dir(mindspore.Tensor) if not name.startswith("_")}
    for name in public | set(rules) | set(f"{_BELOW} {_BELOW_TOO}".split()):
        attribute = getattr(mindspore.Tensor, name, None)
        if name in own or not callable(attribute):
            continue
        setattr(DTensor, name, _method(name, rules[name]) if name in rules else _refusal(name))
    for name in ("H", "data", "mH", "nbytes", "strides"):
        setattr(DTensor, name, property(_refusal(name)))


def _tensors(nest: Any) -> Iterator[DTensor]:
    if isinstance(nest, DTensor):
        yield nest
    elif isinstance(nest, (tuple, list, dict)):
        for entry in nest.values() if isinstance(nest, dict) else nest:
            yield from _tensors(entry)


_define_methods()
