"""DTensor on MindSpore: a subclass around a plain local tensor, caught above autograd.

[Note: the wrapper] What MindSpore sees of a DTensor is a tensor of one string, without memory. Nothing computes with strings
and nothing reads what has no memory, so a function that is not caught fails, and never works on the wrapper.

Functions arrive at ``__fallback__``, by the names of their primitives; those of tensors in tuples only at
``__ms_dispatch__``, further down. Not all methods arrive, so every one of Tensor's is overridden: see
:mod:`hp_dtensor._mindspore.methods`. What neither arrives nor computes is refused where it looks: ``mindspore.Tensor(x)``
and writing ``x`` into a plain tensor.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any

import mindspore

from hp_dtensor._mindspore.checkpoint import CheckpointMethods
from hp_dtensor._mindspore.likes import define_likes
from hp_dtensor._mindspore.methods import define_methods, dtensors
from hp_dtensor._mindspore.parameter import ParameterMethods
from hp_dtensor._mindspore.primitives import TABLE, understood
from hp_dtensor._mindspore.spellings import SPELLINGS
from hp_dtensor.dispatch import build_dispatch
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import no_rule
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_dtensor.spec import Spec
from hp_platform import _process, get_platform
from hp_platform.mindspore import _private

_WRAPPER = mindspore.mint.empty((), dtype=mindspore.string, device="meta")
"""See [Note: the wrapper]."""


class DTensor(ParameterMethods, DTensorMethods, CheckpointMethods, mindspore.Tensor):
    """A tensor of the whole program, of which this rank holds a piece; shape, values and gradients are those of the whole.

    Made by ``DTensor.from_local``, ``distribute_tensor`` and the factories; never by calling the class. Functions and methods
    of the framework take it as they take a plain tensor; what else it has: :class:`hp_dtensor.dtensor.DTensorMethods`.
    """

    def __new__(cls, dtensor: DTensor) -> DTensor:
        """A leaf over the same local tensor: what ``mindspore.Parameter(dtensor)`` is made of."""
        x = mindspore.Tensor._make_subclass(cls, _WRAPPER)
        x._local, x._spec = get_platform().detach(dtensor._local), dtensor._spec
        x._marks, x._grad_dtensor = None, None
        return x

    @staticmethod
    def _wrap(local: mindspore.Tensor, spec: Spec) -> DTensor:
        x = mindspore.Tensor._make_subclass(DTensor, _WRAPPER)
        x._local, x._spec, x._marks, x._grad_dtensor = local, spec, None, None
        return x

    @classmethod
    def __fallback__(cls, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of MindSpore that meets a DTensor."""
        spelled = SPELLINGS.get(func.name)
        if spelled is not None:
            return spelled(func, args, kwargs, dispatch)
        rule = TABLE.get(func.name)
        if rule is not None:
            return dispatch(rule, *understood(func, args, kwargs))
        if _process.open_modes.count and is_skipped(func):
            return on_locals(func, args, kwargs)
        if func.name == "StopGradient":  # what detaching ends in; its tensor comes in a tuple
            return next(dtensors(args)).detach()
        raise no_rule(func.name, [x._spec for x in dtensors((args, kwargs or {}))])

    __ms_dispatch__ = __fallback__

    @property
    def stub(self) -> None:
        """Refused: what takes over a tensor's memory (assign_value, set_data, sparse tensors) asks for it."""
        raise _no_memory(self)

    size = property(
        DTensorMethods.numel, doc="Number of elements of the whole: MindSpore's meaning of the name."
    )
    is_meta = property(lambda x: x._local.is_meta, doc="Whether the local tensor has no memory.")
    itemsize = property(lambda x: x._local.itemsize, doc="Bytes of one element.")
    data = property(lambda x: x.detach(), doc="The same values without their gradient's graph.")
    T = property(lambda x: x.t(), doc="The transpose of a matrix.")
    mT = property(lambda x: x.transpose(-2, -1), doc="The last two dims swapped.")  # noqa: N815 (torch's name)
    H = property(lambda x: x.adjoint(), doc="The conjugate transpose of a matrix.")
    mH = property(  # noqa: N815 (torch's name)
        lambda x: x.adjoint(), doc="The last two dims swapped, complex values conjugated."
    )
    nelement = DTensorMethods.numel
    ndimension = DTensorMethods.dim

    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating one."""
        return bool(self._local.is_floating_point())

    def gather_nd(self, indices: Any) -> Any:
        """``x[i, j]`` for every row ``(i, j)`` of ``indices``, as ``ops.gather_nd``."""
        return mindspore.ops.gather_nd(self, indices)

    def multinomial(self, num_samples: int, replacement: bool = True, seed: int | None = None) -> Any:
        """Categories drawn by the weights of rows, as ``ops.multinomial``."""
        return mindspore.ops.multinomial(self, num_samples, replacement, seed)

    def copy(self) -> DTensor:
        """Another tensor with the same values."""
        return self.clone()

    def __iter__(self) -> Iterator[DTensor]:
        # len() here, so that what cannot be walked says so at once.
        return (self[i] for i in range(len(self)))

    def __contains__(self, element: Any) -> bool:
        known = isinstance(element, (mindspore.Tensor, numbers.Number))
        return known and bool((self == element).any())

    def __index__(self) -> int:
        value = self.item()
        if not isinstance(value, int):
            raise ValueError(f"a DTensor of {self.dtype} is no index: it needs one whole number")
        return int(value)


def _no_memory(x: DTensor) -> NotImplementedError:
    return no_rule("Making a plain tensor", [x._spec])


def _refuse_copy(data: Any) -> None:
    if isinstance(data, DTensor):
        raise _no_memory(data)


dispatch = build_dispatch(DTensor, DTensor._wrap)
define_methods(DTensor, dispatch)
_private.watch_constructor(_refuse_copy)
_private.stack_tuples()
define_likes()
