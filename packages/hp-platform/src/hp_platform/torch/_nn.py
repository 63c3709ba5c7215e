"""Modules, parameters, hooks and functional operations of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hp_platform.overridden import override
from hp_platform.protocols.nn import HookHandle
from hp_platform.torch import _dynamo
from hp_platform.torch._dtypes import resolve
from hp_platform.torch._registrations import num_registrations

_KINDS: tuple[tuple[tuple[type[torch.nn.Module], ...], str], ...] = (
    ((torch.nn.Linear,), "linear"),
    ((torch.nn.Embedding,), "embedding"),
    ((torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d), "convolution"),
    ((torch.nn.LayerNorm,), "layer_norm"),
    ((torch.nn.RMSNorm,), "rms_norm"),
    ((torch.nn.Dropout,), "dropout"),
)


class TorchNNOps:
    """Implements :class:`hp_platform.protocols.NNOps`."""

    Module = torch.nn.Module
    ModuleList = torch.nn.ModuleList
    Parameter = torch.nn.Parameter

    # --- parameters
    parameter = torch.nn.Parameter

    def is_module(self, x: Any) -> bool:
        """Whether it is a torch module."""
        return isinstance(x, torch.nn.Module)

    def is_parameter(self, x: Any) -> bool:
        """Whether it is a torch parameter."""
        return isinstance(x, torch.nn.Parameter)

    def named_parameters(
        self, module: torch.nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Names and parameters."""
        return module.named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)

    def named_buffers(
        self, module: torch.nn.Module, *, recurse: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and buffers."""
        return module.named_buffers(recurse=recurse)

    def register_buffer(self, module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
        """Attach a buffer."""
        module.register_buffer(name, value)

    def set_parameter(self, module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
        """Put a parameter or tensor in a parameter's place.

        The entry of the module's own table is replaced where it stands: ``module.name`` finds it there, its place among the
        others stays, and ``setattr`` (which refuses a plain tensor under a parameter's name) is not needed.
        """
        _check_own(module, name)
        module._parameters[name] = value
        # Recurrent layers hand a list of their own to the kernel.
        if isinstance(module, torch.nn.RNNBase) and name in module._flat_weights_names:
            module._flat_weights[module._flat_weights_names.index(name)] = value

    def parameter_setter(self, module: torch.nn.Module, name: str) -> Callable[[torch.Tensor], None]:
        """``set_parameter`` of one place."""
        _check_own(module, name)
        if isinstance(module, torch.nn.RNNBase):
            return partial(self.set_parameter, module, name)
        # Nothing is quicker: a call costs what writing into a dict costs.
        return partial(module._parameters.__setitem__, name)

    def parameter_getter(self, module: torch.nn.Module, name: str) -> Callable[[], torch.Tensor | None]:
        """``get_parameter`` of one place."""
        _check_own(module, name)
        return partial(module._parameters.get, name)

    def get_parameter(self, module: torch.nn.Module, name: str) -> torch.Tensor | None:
        """What stands in a parameter's place."""
        _check_own(module, name)
        return module._parameters[name]

    def reset_parameters(self, module: torch.nn.Module) -> bool:
        """The module's own initialisation."""
        # The second is the name in attention and transformers.
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, name, None)
            if callable(reset):
                reset()
                return True
        return False

    # --- modules
    def named_modules(
        self, module: torch.nn.Module, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Names and modules."""
        return module.named_modules(remove_duplicate=remove_duplicate)

    def num_registrations(self) -> int:
        """By torch's hooks on registration."""
        return num_registrations()

    def unwrapped_name(self, name: str) -> str:
        """``torch.compile(module)`` puts the module below itself, as ``_orig_mod``."""
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    def get_submodule(self, module: torch.nn.Module, name: str) -> torch.nn.Module:
        """The module at a path."""
        found = module
        for part in name.split(".") if name else ():
            child = found._modules.get(part)
            if child is None:
                raise AttributeError(
                    f"{type(module).__name__} has no sub-module {name!r}: there is no {part!r}"
                )
            found = child
        return found

    def set_submodule(self, module: torch.nn.Module, name: str, value: torch.nn.Module) -> None:
        """Replace the module at a path."""
        if not name:
            raise ValueError("the module itself cannot be replaced: give the dotted name of a sub-module")
        self.get_submodule(module, name)
        parent, _, last = name.rpartition(".")
        setattr(self.get_submodule(module, parent), last, value)

    def set_training(self, module: torch.nn.Module, mode: bool) -> None:
        """Training or evaluation."""
        module.train(mode)

    def state_dict(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Names and detached tensors."""
        return module.state_dict()

    def loading_hooks(
        self, module: torch.nn.Module
    ) -> tuple[list[Callable[..., None]], list[Callable[..., None]]]:
        """Those of register_load_state_dict_pre_hook and its pair."""
        return [*module._load_state_dict_pre_hooks.values()], [*module._load_state_dict_post_hooks.values()]

    def layer_kind(self, module: torch.nn.Module) -> str | None:
        """What a stock layer computes."""
        return next((kind for classes, kind in _KINDS if isinstance(module, classes)), None)

    def has_stock_forward(self, module: torch.nn.Module) -> bool:
        """Whether torch's own forward runs."""
        own = type(module).forward
        return any(own is cls.forward for classes, _ in _KINDS for cls in classes)

    def override_forward(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """Another forward in the place of the module's."""
        override(module, "forward", forward)

    # --- hooks
    def register_forward_pre_hook(
        self, module: torch.nn.Module, hook: Callable[..., Any], *, prepend: bool = False
    ) -> HookHandle:
        """Before forward, with keyword arguments."""
        _dynamo.run_uncompiled([hook])
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)

    def register_forward_hook(
        self, module: torch.nn.Module, hook: Callable[..., Any], *, prepend: bool = False
    ) -> HookHandle:
        """After forward, with keyword arguments."""
        _dynamo.run_uncompiled([hook])
        return module.register_forward_hook(hook, prepend=prepend, with_kwargs=True)

    def register_backward_pre_hook(self, module: torch.nn.Module, hook: Callable[..., Any]) -> HookHandle:
        """Before backward."""
        return module.register_full_backward_pre_hook(hook)

    def register_backward_hook(self, module: torch.nn.Module, hook: Callable[..., Any]) -> HookHandle:
        """After backward."""
        return module.register_full_backward_hook(hook)

    run_uncompiled = staticmethod(_dynamo.run_uncompiled)
    is_compiling = staticmethod(torch.compiler.is_compiling)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """torch.compile without graph breaks."""
        return torch.compile(function, fullgraph=True, **options)

    # --- functional
    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of ``weight``."""
        if weight.shape[-1] == 0:  # on cuda torch's own backward of no width reads outside of its memory
            return ids.new_zeros((*ids.shape, 0), dtype=weight.dtype) + weight.sum(0)
        return functional.embedding(ids, weight)

    linear = staticmethod(functional.linear)
    matmul = staticmethod(torch.matmul)
    silu = staticmethod(functional.silu)
    relu = staticmethod(torch.relu)
    gelu = staticmethod(functional.gelu)
    rsqrt = staticmethod(torch.rsqrt)
    sqrt = staticmethod(torch.sqrt)
    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    cos = staticmethod(torch.cos)
    sin = staticmethod(torch.sin)
    cross_entropy = staticmethod(functional.cross_entropy)

    def scaled_dot_product_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False
    ) -> torch.Tensor:
        """Attention; by torch's composed form where an operand holds nothing."""
        if 0 in q.shape or 0 in k.shape or 0 in v.shape:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of cuda refuse no heads
                return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def matmul_in(self, x: torch.Tensor, y: torch.Tensor, dtype: Any) -> torch.Tensor:
        """A product in a wider dtype."""
        wanted = resolve(dtype)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if _widens(x, wanted):
                return torch.mm(x, y, out_dtype=wanted)
            return torch.mm(x.to(wanted), y.to(wanted))

    def product_dtype(self, x: torch.Tensor) -> torch.dtype:
        """That of autocast, which leaves float64 alone."""
        kind = x.device.type
        if x.dtype.is_floating_point and x.dtype is not torch.float64 and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return x.dtype

    def matmul_into(
        self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A product where it is wanted, by one kernel."""
        target = out[0] if out.dim() == 3 and out.shape[0] == 1 else out
        x = x[0] if target is not out else x
        add = target if add is out else add
        wide: dict[str, Any] = {}
        if target.dtype != x.dtype:
            if target.dim() == 2 and _widens(x, target.dtype):
                wide = {"out_dtype": target.dtype}
            else:
                x, y = x.to(target.dtype), y.to(target.dtype)
        with torch.no_grad():
            if target.dim() == 3:
                y = y.expand(x.shape[0], *y.shape)  # kernels of batches take a stride of 0
                if add is None:
                    torch.bmm(x, y, out=target)
                else:
                    torch.baddbmm(add, x, y, out=target)
            elif add is None:
                torch.mm(x, y, out=target, **wide)
            else:
                torch.addmm(add, x, y, out=target, **wide)
        return out

    def norm(
        self, x: torch.Tensor, dim: int | Sequence[int], keepdim: bool = False, dtype: Any = None
    ) -> torch.Tensor:
        """2-norm over dims."""
        wanted = None if dtype is None else resolve(dtype)
        with torch.no_grad():
            return torch.linalg.vector_norm(x, 2, dim, keepdim, dtype=wanted)

    def softmax(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Softmax along a dim."""
        return torch.softmax(x, dim)

    def sum(
        self, x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> torch.Tensor:
        """Sum over dims."""
        return torch.sum(x, dim, keepdim)

    def mean(
        self, x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> torch.Tensor:
        """Mean over dims."""
        return torch.mean(x, dim, keepdim)


def _widens(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether there are kernels that multiply ``x`` and give ``dtype``."""
    return x.is_cuda and dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16)


def _check_own(module: torch.nn.Module, name: str) -> None:
    if name not in module._parameters:
        known = ", ".join(module._parameters) or "none"
        raise ValueError(f"{type(module).__name__} has no parameter {name!r} of its own; it has: {known}")
