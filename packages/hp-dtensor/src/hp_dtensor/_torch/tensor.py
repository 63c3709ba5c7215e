"""DTensor on PyTorch: a subclass without storage around a plain local tensor, caught at the function level.

The wrapper shows C++ the global shape with the local's dtype and device (optimizers group by those). Functions arrive at
``__torch_function__``; operators and methods that have a rule are defined on the class, which saves the way through C++.
What slips below the Python function level meets ``__torch_dispatch__``, which only raises: nothing computes on a shard by
accident. dynamo does not look into the dispatch: code on DTensors runs uncompiled between what it compiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from hp_dtensor._torch import bridge
from hp_dtensor._torch.answers import answers
from hp_dtensor._torch.autograd import AutogradMethods
from hp_dtensor._torch.bodies import body_of
from hp_dtensor._torch.checkpoint import CheckpointMethods
from hp_dtensor._torch.data import DataMethods
from hp_dtensor._torch.dynamo import functions_of
from hp_dtensor._torch.interop import InteropMethods
from hp_dtensor._torch.tables import method_names, method_of, table
from hp_dtensor.dispatch import build_dispatch
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import no_rule
from hp_dtensor.rules import RULES
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_dtensor.spec import Spec
from hp_platform import _process, get_platform

_STRIDED = torch.strided
_make_wrapper = torch.Tensor._make_wrapper_subclass


class _Caches(torch.Tensor):
    # Slots of a base class: copies of a tensor's state (its __dict__ and own slots) leave them out.
    __slots__ = ("_copy_of_view", "_grad_dtensor", "_marks")


class DTensor(AutogradMethods, DataMethods, DTensorMethods, CheckpointMethods, InteropMethods, _Caches):
    """A tensor of the whole program, of which this rank holds a piece; shape, values and gradients are those of the whole.

    Made by ``DTensor.from_local``, ``distribute_tensor`` and the factories; never by calling the class. Functions and methods
    of the framework take it as they take a plain tensor; what else it has: :class:`hp_dtensor.dtensor.DTensorMethods`.
    """

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
            return dispatch(rule, func, args, kwargs)
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs or {})
        if _process.open_modes.count and is_skipped(func):
            return on_locals(func, args, kwargs)
        body = body_of(func)
        if body is not None:
            return body(*args, **kwargs or {})
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

    def _cast(self, dtype: torch.dtype) -> Any:
        if dtype is self._local.dtype:
            return self
        return dispatch(_CAST, torch.Tensor.to, (self, dtype), None)

    real = property(torch.real, doc="The real part, a view; of real numbers the tensor itself.")
    imag = property(torch.imag, doc="The imaginary part of complex numbers, a view.")
    nbytes = property(lambda x: x.numel() * x.element_size(), doc="Of the whole, in bytes.")
    T = property(lambda x: x.t(), doc="The transpose of a matrix.")
    H = property(
        lambda x: x.t().conj() if x.dtype.is_complex else x.t(), doc="The conjugate transpose of a matrix."
    )
    mT = property(lambda x: x.transpose(-2, -1), doc="The last two dims swapped.")  # noqa: N815 (torch's name)
    mH = property(  # noqa: N815 (torch's name)
        lambda x: x.adjoint(), doc="The last two dims swapped, complex values conjugated; a view."
    )


dispatch = build_dispatch(DTensor, DTensor._wrap, torch.Tensor.copy_)
_CAST = RULES["cast"]

TABLE = table()
"""Function of torch -> its rule."""


def _define_methods() -> None:
    """Methods and operators of torch that have a rule, on the class itself, but for those that it defines."""
    own = {name for base in DTensor.__mro__[: DTensor.__mro__.index(_Caches)] for name in vars(base)}
    for name in method_names():
        function = getattr(torch.Tensor, name, None)
        if name in own:
            TABLE.pop(function, None)
        elif function in TABLE:
            setattr(DTensor, name, method_of(function, TABLE[function], dispatch))


def _name(func: Any) -> str:
    """``Tensor.cumsum``; of an attribute's getter, ``Tensor.H.__get__``."""
    owner: Any = getattr(func, "__self__", None)
    if hasattr(owner, "__objclass__"):
        return f"{torch.Tensor.__name__}.{owner.__name__}.{func.__name__}"
    home = "Tensor" if hasattr(func, "__objclass__") else getattr(func, "__module__", None) or "torch"
    return f"{home}.{getattr(func, '__name__', func)}"


def _tensors(nest: Any) -> list[DTensor]:
    return [x for x in torch.utils._pytree.tree_leaves(nest) if isinstance(x, DTensor)]


_define_methods()
ANSWERS = answers(DTensor)
"""Function of torch -> what answers it instead of a rule."""
get_platform().run_uncompiled((dispatch, *functions_of(DTensor, torch.Tensor)))
bridge.install(DTensor)
for _types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    # Else optimizers and clip_grad_norm_ would go parameter by parameter, as torch's own DTensor tells them, too.
    if DTensor not in _types:
        _types.append(DTensor)
