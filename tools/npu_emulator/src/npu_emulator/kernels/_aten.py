"""CPU kernels for the aten operators that torch_npu implements.

Each operator with an NPU kernel gets one that sees the NPU memory as CPU tensors and runs the CPU kernel on them.
Operators that torch_npu does not implement are left alone: they take its real CPU fallback, with its real warning.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives

from npu_emulator.kernels import _streams
from npu_emulator.kernels._calls import calls
from npu_emulator.kernels._memory import argument_as_cpu, as_cpu, convert, device_of, is_npu, to_npu
from npu_emulator.kernels._random import cpu_generator

_KEY = "PrivateUse1"

# torch_npu's own kernels stay where nothing is computed: allocation, views, and what belongs to its bookkeeping.
_KEPT = {
    "_copy_from_and_resize",
    "_has_compatible_shallow_copy_type",
    "_local_scalar_dense",
    "_pin_memory",
    "_reshape_alias",
    "alias",
    "as_strided",
    "contiguous",
    "detach",
    "empty.memory_format",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "pin_memory",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_.source_Tensor_storage_offset",
    "squeeze",
    "squeeze.dim",
    "unfold",
    "unsqueeze",
    "view",
    "view_as_complex",
    "view_as_real",
}

# Composite operators for which torch_npu has an autograd formula of its own, in C++ and straight to aclnn kernels,
# which are not emulated. They take PyTorch's decomposition instead.
_DECOMPOSED = (
    "contiguous",
    "kl_div",
    "l1_loss",
    "matmul",
    "repeat_interleave.self_Tensor",
    "repeat_interleave.self_int",
    "scaled_dot_product_attention",
    "softmax.int",
)

# The same for integer results, which need no autograd: the CPU operator as a whole. PyTorch's decomposition of
# `one_hot` calls operators without an NPU kernel, which torch_npu's formula does not.
_WHOLE = ("argsort", "argsort.stable", "one_hot")

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Override the kernels of torch_npu."""
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or name in _KEPT or name in _COPIES:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, _KEY):
            continue
        operator = _operator(name)
        if operator is not None and not _returns_view(operator):
            _library.impl(name, _kernel(operator), _KEY, allow_override=True)
    for name, copy in _COPIES.items():
        _library.impl(name, copy, _KEY, allow_override=True)
    composites = {
        name: operator.decompose for name in _DECOMPOSED if (operator := _operator(name)) is not None
    }
    composites |= {name: _kernel(operator) for name in _WHOLE if (operator := _operator(name)) is not None}
    for name, function in composites.items():
        for key in ("AutogradPrivateUse1", _KEY):
            _library.impl(name, function, key, allow_override=True)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), overload or "default")
    except (AttributeError, RuntimeError):  # listed by the dispatcher, not offered to Python
        return None


def _returns_view(operator: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)


def _kernel(operator: Any) -> Callable[..., Any]:
    """The CPU kernel of `operator`, for NPU tensors."""
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    # For each result: the written argument that it is, or None for a new tensor.
    unclaimed = iter(written)
    results = [next(unclaimed) if r.alias_info is not None else None for r in schema.returns]
    draws = "generator" in names

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[operator._name] += 1
        _streams.wait_for_current_stream()
        given = dict(zip(names, args, strict=False)) | kwargs
        device = device_of(given.values())
        seen = {name: convert(value, argument_as_cpu) for name, value in given.items()}
        if draws:
            seen["generator"] = cpu_generator(given.get("generator"), device)
        if seen.get("pin_memory"):
            seen["pin_memory"] = False
        targets = {}
        if _streams.writes_are_late:
            for name in written:
                if name in seen:
                    targets[name] = seen[name]
                    seen[name] = convert(
                        seen[name], lambda t: t.clone() if isinstance(t, torch.Tensor) else t
                    )
        # The order of `given` is that of the schema for positional arguments, so these can be passed on as they came.
        positional = [seen[name] for name in names[: len(args)]]
        result = operator(
            *positional, **{name: value for name, value in seen.items() if name not in names[: len(args)]}
        )
        for name in written:
            if name in given:
                _carry_over(given[name], seen[name], targets.get(name))
        if not results:
            return None
        values = result if len(results) > 1 else (result,)
        made = tuple(
            given[name]
            if name
            else convert(value, lambda r: to_npu(r, device) if isinstance(r, torch.Tensor) else r)
            for name, value in zip(results, values, strict=True)
        )
        return made if len(results) > 1 else made[0]

    return kernel


def _carry_over(argument: Any, written: Any, target: Any) -> None:
    """Bring what the CPU kernel wrote to the NPU argument, where that is not the same memory already.

    `written` is what the CPU kernel was given; `target` the CPU view of the argument if `written` is a copy of it.
    """
    if isinstance(argument, (list, tuple)):
        targets = target if target is not None else [None] * len(argument)
        for one, one_written, one_target in zip(argument, written, targets, strict=True):
            _carry_over(one, one_written, one_target)
    elif isinstance(argument, torch.Tensor):
        if argument.size() != written.size():  # `out=` of another size
            argument.resize_(written.size())
            _streams.write(as_cpu(argument), written)
        elif target is not None:
            _streams.write(target, written)


def _copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    calls["aten::copy_"] += 1
    _copy_from(src, self, non_blocking)
    return self


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _streams.wait_for_current_stream()
    target, source = as_cpu(dst), as_cpu(self)
    # To pageable memory, or when asked to block, the copy is complete on return.
    may_be_late = is_npu(dst) or (non_blocking and dst.is_pinned())
    if _streams.writes_are_late and may_be_late:
        _streams.write(target, source.expand_as(target).to(target.dtype))
    else:
        target.copy_(source)
    return dst


def _to_copy(*args: Any, **kwargs: Any) -> torch.Tensor:
    """PyTorch's own: `empty_strided` and `copy_`."""
    return torch.ops.aten._to_copy.default._op_dk(
        torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs
    )


_COPIES = {"copy_": _copy_, "_copy_from": _copy_from, "_to_copy": _to_copy}
