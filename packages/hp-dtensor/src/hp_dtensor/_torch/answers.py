"""Functions of torch on DTensors that need no rule: the class answers, or the local tensor does, or two local tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from hp_dtensor._torch import autograd, compositions, lists
from hp_dtensor._torch.context import unwrapped
from hp_dtensor._torch.makers import MAKERS
from hp_dtensor._torch.samples import SAMPLERS
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import name_of

Answer = Callable[..., Any]
_FROM_LOCAL = """
    is_floating_point is_complex is_signed element_size get_device is_contiguous is_inference is_conj is_neg is_cuda is_cpu
    is_meta is_xpu is_mps is_sparse is_quantized is_mkldnn is_nested is_vulkan is_xla is_ipu is_maia is_mtia layout itemsize
    _version retains_grad names has_names _backward_hooks _post_accumulate_grad_hooks name volatile _is_zerotensor
"""
"""Methods and attributes whose answer for the local tensor is the answer for the whole."""
_OF_LOCALS = (torch._has_compatible_shallow_copy_type, torch.result_type)
"""Functions of several tensors that look at what DTensors and their local tensors have in common."""


def answers(cls: type) -> dict[Any, Answer]:
    """Function of torch -> its answer, for the class of DTensors."""
    found: dict[Any, Answer] = {
        **autograd.HANDLERS,
        **compositions.HANDLERS,
        **lists.handlers(),
        **MAKERS,
        **SAMPLERS,
    }
    for name in _FROM_LOCAL.split():
        _answer_from_local(found, name)
    for function in _OF_LOCALS:
        found[function] = _of_locals(function)
    base = cls.__mro__.index(torch.Tensor)
    own = {name: value for part in reversed(cls.__mro__[:base]) for name, value in vars(part).items()}
    for name, value in own.items():
        function = getattr(torch.Tensor, name, None)
        if isinstance(value, property) and hasattr(function, "__get__"):
            pairs = ((value.fget, "__get__"), (value.fset, "__set__"), (value.fdel, "__delete__"))
            found.update(
                {
                    getattr(function, how): own_one
                    for own_one, how in pairs
                    if own_one and hasattr(function, how)
                }
            )
        elif isinstance(value, FunctionType) and callable(function):
            found[function] = _on_dtensor_first(value, function, cls)
    for name in ("detach", "numel"):
        found[getattr(torch, name)] = own[name] if name in own else getattr(cls, name)
    found[torch.Tensor.nelement] = found[torch.numel]
    # Of the outer tensor itself: only swap_tensors asks.
    found[torch.Tensor._use_count] = _of_outer(torch.Tensor._use_count)
    return found


def _answer_from_local(found: dict[Any, Answer], name: str) -> None:
    own = getattr(torch.Tensor, name, None)
    if own is None:
        return  # another version's attribute
    getter = own if callable(own) else own.__get__

    def answer(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getter(x._local, *args, **kwargs)

    found.update({getter: answer, getattr(torch, name, getter): answer})


def _of_locals(function: Any) -> Answer:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return function(*map(unwrapped, args), **kwargs)

    return answer


def _of_outer(function: Any) -> Answer:
    def answer(x: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(x)

    return answer


def _on_dtensor_first(method: Any, function: Any, cls: type) -> Answer:
    def answer(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, DTensorMethods):
            raise ValueError(
                f"{name_of(function)} of a plain tensor with a DTensor: a plain tensor cannot hold what is sharded; use the "
                f"DTensor's full_tensor() or to_local(), or distribute the plain tensor"
            )
        return method(x, *args, **kwargs)

    return answer
