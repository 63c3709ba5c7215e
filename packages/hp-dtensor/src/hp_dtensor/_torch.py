"""DTensor on PyTorch: a subclass without storage around a plain local tensor, caught at the function level.

The wrapper shows C++ the global shape with the local's dtype and device (optimizers group by those). Functions arrive at
``__torch_function__``; operators and methods that have a rule are defined on the class, which saves the way through C++.
What slips below the Python function level meets ``__torch_dispatch__``, which only raises: nothing computes on a shard by
accident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor import _names, _torch_lists
from hp_dtensor._torch_checkpoint import CheckpointMethods
from hp_dtensor.dispatch import build_dispatch
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import no_rule
from hp_dtensor.rules import RULES
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_dtensor.spec import Spec
from hp_platform import _process

_HOMES = (torch.Tensor, torch, torch.nn.functional, torch.special)
_STRIDED = torch.strided
_make_wrapper = torch.Tensor._make_wrapper_subclass


class _Caches(torch.Tensor):
    # Slots of a base class: copies of a tensor's state (its __dict__ and own slots) leave them out.
    __slots__ = ("_grad_dtensor", "_marks")


class DTensor(DTensorMethods, CheckpointMethods, _Caches):
    """See :class:`hp_dtensor.dtensor.DTensorMethods`."""

    __slots__ = ("_local", "_spec")

    @staticmethod
    def _wrap(local: torch.Tensor, spec: Spec) -> DTensor:
        # Positional: keywords would cost half as much again.
        x = _make_wrapper(DTensor, spec.shape, None, None, None, local.dtype, _STRIDED, local.device)
        x._local, x._spec, x._marks, x._grad_dtensor = local, spec, None, None
        return x

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch that meets a DTensor."""
        rule = TABLE.get(func)
        if rule is not None:
            return _dispatch(rule, func, args, kwargs)
        if _process.open_skips.count and is_skipped(func):
            return on_locals(func, args, kwargs)
        about = ABOUT_LOCAL.get(func)
        if about is not None:
            return about(*args, **kwargs or {})
        raise no_rule(_name(func), [x._spec for x in _tensors((args, kwargs or {}))])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What has slipped below the Python function level."""
        specs = [x._spec for x in _tensors((args, kwargs or {}))]
        raise no_rule(f"{func}, which reached a DTensor below the Python function level,", specs)

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self._spec.shape)

    @property
    def grad_fn(self) -> Any:
        """The node that made the local tensor."""
        return self._local.grad_fn

    T = property(lambda x: x.t(), doc="The transpose of a matrix.")
    mT = property(lambda x: x.transpose(-2, -1), doc="The last two dims swapped.")  # noqa: N815 (torch's name)


_dispatch = build_dispatch(DTensor, DTensor._wrap, torch.Tensor.copy_)


def _found(name: str) -> list[Any]:
    """Every function of torch that goes by a name; a dotted one is looked up below torch."""
    if "." in name:
        home = torch
        for part in name.split(".")[:-1]:
            home = getattr(home, part)
        found = [getattr(home, name.rpartition(".")[2], None)]
    else:
        # Modules have operators, too, of their own.
        homes = _HOMES[:1] if name.startswith("__") else _HOMES
        found = [getattr(home, name, None) for home in homes]
    return [function for function in found if callable(function)]


def _table() -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for rule, name in _names.functions():
        table.update(dict.fromkeys(_found(name), RULES[rule]))
    for rule, name in _names.in_place():
        functional = _found(_names.functional_name(name))[0]
        table.update(dict.fromkeys(_found(name), RULES[rule].writing(functional)))
    return table


TABLE = _table()
"""Function of torch -> its rule."""

ABOUT_LOCAL: dict[Any, Callable[..., Any]] = {
    torch.numel: DTensorMethods.numel,
    torch.Tensor.nelement: DTensorMethods.numel,
    torch.detach: DTensorMethods.detach,
    torch.Tensor.detach: DTensorMethods.detach,
}
"""Functions whose answer for the local tensor is the answer for the whole."""


def _answer_from_local(names: str) -> None:
    for name in names.split():
        own = getattr(torch.Tensor, name)
        getter = own if callable(own) else own.__get__

        def answer(x: DTensor, *args: Any, _getter: Any = getter, **kwargs: Any) -> Any:
            return _getter(x._local, *args, **kwargs)

        ABOUT_LOCAL.update({getter: answer, getattr(torch, name, getter): answer})


def _define_methods() -> None:
    """Methods and operators of torch that have a rule, on the class itself."""
    for _, name in (*_names.functions(), *_names.in_place()):
        function = getattr(torch.Tensor, name, None)
        if function in TABLE:
            setattr(DTensor, name, _method(function))


def _method(function: Any) -> Callable[..., Any]:
    rule = TABLE[function]

    def method(*args: Any, **kwargs: Any) -> Any:
        return _dispatch(rule, function, args, kwargs)

    method.__name__, method.__doc__ = function.__name__, function.__doc__
    return method


def _name(func: Any) -> str:
    """``Tensor.cumsum``; of an attribute's getter, ``Tensor.H.__get__``."""
    owner: Any = getattr(func, "__self__", None)
    if hasattr(owner, "__objclass__"):
        return f"{torch.Tensor.__name__}.{owner.__name__}.{func.__name__}"
    home = "Tensor" if hasattr(func, "__objclass__") else getattr(func, "__module__", None) or "torch"
    return f"{home}.{getattr(func, '__name__', func)}"


def _tensors(nest: Any) -> list[DTensor]:
    return [x for x in torch.utils._pytree.tree_leaves(nest) if isinstance(x, DTensor)]


ABOUT_LOCAL.update(_torch_lists.handlers())
_define_methods()
_answer_from_local(
    "is_floating_point is_complex is_signed element_size get_device is_contiguous is_inference"
)
_answer_from_local(
    "is_cuda is_cpu is_meta is_sparse is_quantized layout itemsize _version retains_grad is_nested"
)
