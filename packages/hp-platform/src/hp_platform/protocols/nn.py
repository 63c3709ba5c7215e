"""Modules and parameters: walk, find, replace, hooks; and the few functions a model is made of.

A model written on these runs on both frameworks: derive from ``platform.Module``, define ``forward``, keep parameters as
attributes (``self.weight = platform.parameter(...)``) and sub-modules as attributes or in ``platform.ModuleList``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from hp_platform.protocols.tensor import DType, Tensor

Module: TypeAlias = Any
Parameter: TypeAlias = Any
AnyModule: TypeAlias = Module
"""For annotations inside of the Protocol, where ``Module`` is the framework's class; likewise the next."""
AnyParameter: TypeAlias = Parameter


class HookHandle(Protocol):
    """What registering a hook returns."""

    def remove(self) -> None:
        """Take the hook away; calling it again does nothing."""
        ...


class NNOps(Protocol):
    """Primitives on modules, and functional operations."""

    Module: type
    ModuleList: type
    Parameter: type

    # --- parameters
    def parameter(self, data: Tensor, requires_grad: bool = True) -> AnyParameter:
        """A parameter over ``data`` (no copy where the framework can)."""
        ...

    def is_module(self, x: Any) -> bool:
        """Whether ``x`` is a module of this framework: also a stock one, on MindSpore any cell."""
        ...

    def is_parameter(self, x: Any) -> bool:
        """Whether ``x`` is a parameter of this framework."""
        ...

    def named_parameters(
        self, module: AnyModule, *, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, AnyParameter]]:
        """Full name and parameter, in the order of registration; a shared one once under its first name unless told otherwise."""
        ...

    def named_buffers(self, module: AnyModule, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Full name and buffer."""
        ...

    def register_buffer(self, module: AnyModule, name: str, value: Tensor) -> None:
        """Attach a tensor that is state, moves with the module, and is not trained."""
        ...

    def set_parameter(self, module: AnyModule, name: str, value: AnyParameter | Tensor | None) -> None:
        """Make ``module.name`` (a direct attribute that is a parameter now) this parameter, or for a while this plain tensor.

        A plain tensor is what FSDP shows to forward; ``named_parameters`` need not list it. Setting a Parameter again restores it at its old place.
        None: the place is empty, and nothing holds what stood there.
        """
        ...

    def parameter_setter(self, module: AnyModule, name: str) -> Callable[[AnyParameter | Tensor], None]:
        """:meth:`set_parameter` of this place, looked up once: for those who exchange parameters many times a step."""
        ...

    def parameter_getter(self, module: AnyModule, name: str) -> Callable[[], AnyParameter | Tensor | None]:
        """:meth:`get_parameter` of this place, looked up once."""
        ...

    def get_parameter(self, module: AnyModule, name: str) -> AnyParameter | Tensor | None:
        """What stands at ``module.name`` now: the parameter, or the plain tensor that :meth:`set_parameter` has put there (None
        where a module says that it has no such parameter, as a layer without bias). ValueError if it is not one of its own.
        """
        ...

    def reset_parameters(self, module: AnyModule) -> bool:
        """Let the module initialise its own parameters and buffers where they are, as its class does when it is made, from the
        framework's generator; its sub-modules are not asked. Returns whether it can: False means that nothing happened.
        torch: its ``reset_parameters`` or ``_reset_parameters``, as all of torch's own layers with parameters have. MindSpore:
        its ``reset_parameters``, which few cells have.
        """
        ...

    # --- modules
    def named_modules(
        self, module: AnyModule, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, AnyModule]]:
        """Full name and module, the module itself first under ``""``; each once, or under all of its names."""
        ...

    def num_registrations(self) -> int:
        """How many parameters and modules have been hung into modules of this process since this was asked first: the same number as
        before says that no module has got another one. What :meth:`set_parameter` puts somewhere does not count. MindSpore tells
        nobody of them: always 0 there.
        """
        ...

    def unwrapped_name(self, name: str) -> str:
        """The dotted name of a parameter, buffer or module without the parts that wrappers of the framework's compiler put in."""
        ...

    def get_submodule(self, module: AnyModule, name: str) -> AnyModule:
        """The module at a dotted path; ``""`` is the module itself. AttributeError with the full path if it is missing."""
        ...

    def set_submodule(self, module: AnyModule, name: str, value: AnyModule) -> None:
        """Replace the module at a dotted path."""
        ...

    def set_training(self, module: AnyModule, mode: bool) -> None:
        """Training (True) or evaluation mode, for all sub-modules."""
        ...

    def state_dict(self, module: AnyModule) -> Mapping[str, Tensor]:
        """Full name to detached tensor that shares memory with the parameter or buffer."""
        ...

    def loading_hooks(self, module: AnyModule) -> tuple[list[Callable[..., None]], list[Callable[..., None]]]:
        """What users have registered on this very module, to run before and after it reads a state dict, in order.

        ``before(state_dict, prefix, metadata, strict, missing, unexpected, errors)``: writes to ``state_dict``, whose names begin with
        ``prefix``, and to the three lists. ``after(module, names)``: may write to the lists ``missing_keys`` and ``unexpected_keys`` of ``names``.
        """
        ...

    def layer_kind(self, module: AnyModule) -> str | None:
        """What a stock layer of the framework computes (also one derived from it): ``"linear"`` (parameters ``weight (out, in)`` and
        ``bias (out,)`` or none), ``"embedding"`` (``weight (num, dim)``), ``"convolution"`` (``weight (out, in / groups, ...)``,
        ``bias (out,)`` or none, attribute ``groups``), ``"layer_norm"``, ``"rms_norm"``, ``"dropout"``; None for other modules.
        """
        ...

    def has_stock_forward(self, module: AnyModule) -> bool:
        """Whether a layer with a :meth:`layer_kind` computes just what the framework's own class does: its forward is not overridden."""
        ...

    def override_forward(self, module: AnyModule, forward: Callable[..., Any]) -> None:
        """Let ``forward(module, own, args, kwargs)`` run in the place of the module's forward; ``own(*args, **kwargs)`` is the former.

        Hooks stay around it, the name of the class stays, and the module can be copied if ``forward`` can: it is kept on the
        module. Calling it again puts the new one around the former one.
        """
        ...

    # --- hooks. Earlier registered run first, prepended ones before all.
    def register_forward_pre_hook(
        self,
        module: AnyModule,
        hook: Callable[[AnyModule, tuple, dict], tuple[tuple, dict] | None],
        *,
        prepend: bool = False,
    ) -> HookHandle:
        """``hook(module, args, kwargs)`` before forward; may return new ``(args, kwargs)``. Never compiled, see :meth:`run_uncompiled`."""
        ...

    def register_forward_hook(
        self, module: AnyModule, hook: Callable[[AnyModule, tuple, dict, Any], Any], *, prepend: bool = False
    ) -> HookHandle:
        """``hook(module, args, kwargs, output)`` after forward; a result other than None replaces the output. Never compiled."""
        ...

    def register_backward_pre_hook(
        self, module: AnyModule, hook: Callable[[AnyModule, tuple], tuple | None]
    ) -> HookHandle:
        """``hook(module, grad_output)`` before the module's backward; may return other gradients."""
        ...

    def register_backward_hook(
        self, module: AnyModule, hook: Callable[[AnyModule, tuple, tuple], tuple | None]
    ) -> HookHandle:
        """``hook(module, grad_input, grad_output)`` after the gradients of the module's inputs are known; may return other ones."""
        ...

    def run_uncompiled(self, functions: Iterable[Callable[..., Any]], *, recurse: bool = True) -> None:
        """Keep the framework's compiler (torch.compile) out of these functions and all that they call: they run as they are.

        For hooks that communicate or exchange parameters. The compiler ends its graph before them and begins another one after.
        ``recurse`` False: what they call is compiled, for a function around something else.
        Where the framework compiles nothing by itself there is nothing to do.
        """
        ...

    def is_compiling(self) -> bool:
        """Whether the code that asks is being recorded by the framework's compiler, and not run (False where there is none)."""
        ...

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function compiled as one graph at its first call, or the compiler's error that says where it is not one. ``options`` are
        the compiler's own. NotImplementedError unless ``supports("traced_collectives")``.
        """
        ...

    # --- functional: differentiable, with the framework's own kernels
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``; weight ``(out, in)``."""
        ...

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Matrix product with broadcast batch dims."""
        ...

    def matmul_in(self, x: Tensor, y: Tensor, dtype: DType) -> Tensor:
        """The product of two matrices of one dtype, added up and given in a wider one; not recorded.

        In one kernel where the backend has it (cuda, float32 of 16-bit floats); else of converted copies.
        """
        ...

    def product_dtype(self, x: Tensor) -> DType:
        """In which dtype :meth:`linear` and :meth:`matmul` multiply ``x`` now: its own, but where the framework casts by itself
        (``torch.autocast``).
        """
        ...

    def matmul_into(self, out: Tensor, x: Tensor, y: Tensor, add: Tensor | None = None) -> Tensor:
        """``x (n, k) @ y (k, m)``, plus ``add``, written into ``out (n, m)``, which may be a view of a larger tensor; not recorded.

        ``x`` and ``out`` may have one batch dim before, which ``y`` has not. ``add`` is ``out`` itself (what it holds is added
        to) or a tensor that broadcasts to it, such as a bias ``(m,)``. ``out`` and ``add`` may be wider than the operands (float32 of
        16-bit floats): then it is added up in that dtype, in one kernel where :meth:`matmul_in` is one. Returns ``out``.
        """
        ...

    def norm(
        self, x: Tensor, dim: int | Sequence[int], keepdim: bool = False, dtype: DType | None = None
    ) -> Tensor:
        """The 2-norm over dims, of ``x`` converted to ``dtype`` first (None: its own), without a converted copy where the backend
        can; of nothing 0. No gradient is recorded.
        """
        ...

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of ``weight (num, dim)`` at integer ``ids``."""
        ...

    def softmax(self, x: Tensor, dim: int = -1) -> Tensor:
        """Softmax along ``dim``."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """``x * sigmoid(x)``."""
        ...

    def relu(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """The exact (erf) form."""
        ...

    def rsqrt(self, x: Tensor) -> Tensor:
        """``1 / sqrt(x)``."""
        ...

    def sqrt(self, x: Tensor) -> Tensor:
        """Square root."""
        ...

    def exp(self, x: Tensor) -> Tensor:
        """Exponential."""
        ...

    def log(self, x: Tensor) -> Tensor:
        """Natural logarithm."""
        ...

    def cos(self, x: Tensor) -> Tensor:
        """Cosine, radians."""
        ...

    def sin(self, x: Tensor) -> Tensor:
        """Sine, radians."""
        ...

    def sum(self, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """Sum over dims, or over all."""
        ...

    def mean(self, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """Mean over dims, or over all."""
        ...

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over rows of ``-log softmax(logits (n, c))[target (n,)]``, in nats."""
        ...

    def scaled_dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False
    ) -> Tensor:
        """Attention over ``(batch, heads, length, head_dim)``, scale ``head_dim ** -0.5``."""
        ...
