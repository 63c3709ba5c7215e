"""Modules, parameters and hooks of MindSpore.

A parameter's own ``name`` does not matter here: names are those of the attributes, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import mindspore
from mindspore import mint, ops

from hp_platform.mindspore import _private
from hp_platform.mindspore._module import Module, ModuleList
from hp_platform.mindspore._recording import ensure_recording
from hp_platform.overridden import override
from hp_platform.protocols.nn import HookHandle

_KINDS: tuple[tuple[tuple[type[mindspore.nn.Cell], ...], str], ...] = (
    ((mint.nn.Linear, mindspore.nn.Dense), "linear"),
    ((mint.nn.Embedding,), "embedding"),
    ((mint.nn.Conv2d, mint.nn.Conv3d), "convolution"),
    ((mint.nn.LayerNorm,), "layer_norm"),
    ((mint.nn.Dropout,), "dropout"),
)


class MindSporeNNOps:
    """Implements what :class:`hp_platform.protocols.NNOps` has for modules."""

    Module = Module
    ModuleList = ModuleList
    Parameter = mindspore.Parameter

    # --- parameters
    def parameter(self, data: mindspore.Tensor, requires_grad: bool = True) -> mindspore.Parameter:
        """A parameter over the memory of ``data``; of a subclass of Tensor, one that is both."""
        ensure_recording()
        if isinstance(data, mindspore.Parameter) and not data.is_meta:
            data = ops.stop_gradient(data)  # of a parameter that is more than that, the rest
        if type(data) is not mindspore.Tensor and not isinstance(data, mindspore.Parameter):
            # The subclass's own __new__, which MindSpore calls, makes it.
            return mindspore.Parameter(data, requires_grad=requires_grad)
        # The constructor copies; made without memory, the parameter takes over that of data.
        made = mindspore.Parameter(
            mint.empty(data.shape, dtype=data.dtype, device="meta"), requires_grad=requires_grad
        )
        if not data.is_meta:
            _private.update_data(made, ops.stop_gradient(data))
        return made

    def is_module(self, x: Any) -> bool:
        """Whether it is a cell."""
        return isinstance(x, mindspore.nn.Cell)

    def is_parameter(self, x: Any) -> bool:
        """Whether it is a MindSpore parameter."""
        return isinstance(x, mindspore.Parameter)

    def named_parameters(
        self, module: mindspore.nn.Cell, *, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, mindspore.Parameter]]:
        """Names and parameters, but for those that a plain tensor stands in for at the moment."""
        ensure_recording()
        seen: set[int] = set()
        for prefix, cell in _walk(module, recurse=recurse, remove_duplicate=remove_duplicate):
            for name, parameter in _private.params_of(cell).items():
                if parameter is None or name in cell.__dict__ or (remove_duplicate and id(parameter) in seen):
                    continue
                seen.add(id(parameter))
                yield _joined(prefix, name), parameter

    def named_buffers(
        self, module: mindspore.nn.Cell, *, recurse: bool = True
    ) -> Iterator[tuple[str, mindspore.Tensor]]:
        """Names and buffers."""
        seen: set[int] = set()
        for prefix, cell in _walk(module, recurse=recurse):
            for name, buffer in _private.buffers_of(cell).items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield _joined(prefix, name), buffer

    def register_buffer(self, module: mindspore.nn.Cell, name: str, value: mindspore.Tensor) -> None:
        """Attach a buffer."""
        module.register_buffer(name, value)

    def set_parameter(self, module: mindspore.nn.Cell, name: str, value: mindspore.Tensor | None) -> None:
        """Put a parameter or tensor in a parameter's place.

        The parameter keeps its place in the cell's table; a plain tensor stands before it in the instance's own dictionary,
        where attribute access looks first.
        """
        table = _own_table(module, name)
        if value is None or isinstance(value, mindspore.Parameter):
            module.__dict__.pop(name, None)
            table[name] = value
        else:
            module.__dict__[name] = value

    def parameter_setter(self, module: mindspore.nn.Cell, name: str) -> Callable[[mindspore.Tensor], None]:
        """``set_parameter`` of one place."""
        self.get_parameter(module, name)  # refuses a name that is none
        return partial(self.set_parameter, module, name)

    def parameter_getter(self, module: mindspore.nn.Cell, name: str) -> Callable[[], mindspore.Tensor | None]:
        """``get_parameter`` of one place."""
        self.get_parameter(module, name)  # refuses a name that is none
        return partial(self.get_parameter, module, name)

    def get_parameter(self, module: mindspore.nn.Cell, name: str) -> mindspore.Tensor | None:
        """What stands in a parameter's place."""
        table = _own_table(module, name)
        return module.__dict__.get(name, table[name])

    def reset_parameters(self, module: mindspore.nn.Cell) -> bool:
        """The cell's own initialisation."""
        # A cell's init_parameters_data, which all have, only gives memory to parameters that were made without, in all sub-cells.
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            return False
        reset()
        return True

    # --- modules
    def named_modules(
        self, module: mindspore.nn.Cell, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, mindspore.nn.Cell]]:
        """Names and modules."""
        return _walk(module, remove_duplicate=remove_duplicate)

    def num_registrations(self) -> int:
        """Cells tell nobody."""
        return 0

    def unwrapped_name(self, name: str) -> str:
        """The name itself: compiled cells stay what they are."""
        return name

    def get_submodule(self, module: mindspore.nn.Cell, name: str) -> mindspore.nn.Cell:
        """The module at a path."""
        found = module
        for part in name.split(".") if name else ():
            child = _private.cells_of(found).get(part)
            if child is None:
                raise AttributeError(
                    f"{type(module).__name__} has no sub-module {name!r}: there is no {part!r}"
                )
            found = child
        return found

    def set_submodule(self, module: mindspore.nn.Cell, name: str, value: mindspore.nn.Cell) -> None:
        """Replace the module at a path."""
        if not name:
            raise ValueError("the module itself cannot be replaced: give the dotted name of a sub-module")
        self.get_submodule(module, name)
        parent, _, last = name.rpartition(".")
        _private.cells_of(self.get_submodule(module, parent))[last] = value

    def set_training(self, module: mindspore.nn.Cell, mode: bool) -> None:
        """Training or evaluation."""
        module.set_train(mode)

    def state_dict(self, module: mindspore.nn.Cell) -> Mapping[str, mindspore.Tensor]:
        """Names and detached tensors; what is shared stands under each of its names."""
        found: dict[str, mindspore.Tensor] = {}
        for prefix, cell in _walk(module, remove_duplicate=False):
            for table in (_private.params_of(cell), _private.buffers_of(cell)):
                for name, value in table.items():
                    if value is not None:
                        found[_joined(prefix, name)] = ops.stop_gradient(cell.__dict__.get(name, value))
        return found

    def loading_hooks(
        self, module: mindspore.nn.Cell
    ) -> tuple[list[Callable[..., None]], list[Callable[..., None]]]:
        """Those of register_load_state_dict_pre_hook and its pair."""
        before, after = _private.loading_hooks_of(module)
        return [partial(hook, module) for hook in before], after

    def layer_kind(self, module: mindspore.nn.Cell) -> str | None:
        """What a stock layer computes. A Dense with an activation is none: that is not linear."""
        if isinstance(module, mindspore.nn.Dense) and module.activation is not None:
            return None
        return next((kind for classes, kind in _KINDS if isinstance(module, classes)), None)

    def has_stock_forward(self, module: mindspore.nn.Cell) -> bool:
        """Whether MindSpore's own construct runs."""
        own = type(module).construct
        return any(own is cls.construct for classes, _ in _KINDS for cls in classes)

    def override_forward(self, module: mindspore.nn.Cell, forward: Callable[..., Any]) -> None:
        """Another forward in the place of the module's."""
        override(module, "construct", forward)

    # --- hooks
    def register_forward_pre_hook(
        self, module: mindspore.nn.Cell, hook: Callable[..., Any], *, prepend: bool = False
    ) -> HookHandle:
        """Before forward, with keyword arguments."""
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)

    def register_forward_hook(
        self, module: mindspore.nn.Cell, hook: Callable[..., Any], *, prepend: bool = False
    ) -> HookHandle:
        """After forward, with keyword arguments."""
        return module.register_forward_hook(hook, prepend=prepend, with_kwargs=True)

    def register_backward_pre_hook(self, module: mindspore.nn.Cell, hook: Callable[..., Any]) -> HookHandle:
        """Before backward."""
        return module.register_backward_pre_hook(hook)

    def register_backward_hook(self, module: mindspore.nn.Cell, hook: Callable[..., Any]) -> HookHandle:
        """After backward."""
        return module.register_backward_hook(hook)

    def run_uncompiled(self, functions: Iterable[Callable[..., Any]], *, recurse: bool = True) -> None:
        """Nothing to do: what runs in PyNative mode is compiled only where the user says so, function by function."""

    def is_compiling(self) -> bool:
        """Modules run in PyNative mode."""
        return False

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Refused."""
        raise NotImplementedError(
            f"compile: MindSpore {mindspore.__version__} runs modules uncompiled here (PyNative mode): leave the compilation out"
        )


def _own_table(module: mindspore.nn.Cell, name: str) -> dict[str, mindspore.Parameter | None]:
    """The cell's table of parameters. ValueError unless ``name`` is in it."""
    table = _private.params_of(module)
    if name not in table:
        known = ", ".join(table) or "none"
        raise ValueError(f"{type(module).__name__} has no parameter {name!r} of its own; it has: {known}")
    return table


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _walk(
    module: mindspore.nn.Cell, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, mindspore.nn.Cell]]:
    """Full names and cells, parents first, in the order of registration."""
    seen: set[int] = set()

    def visit(prefix: str, cell: mindspore.nn.Cell) -> Iterator[tuple[str, mindspore.nn.Cell]]:
        if remove_duplicate and id(cell) in seen:
            return
        seen.add(id(cell))
        yield prefix, cell
        for name, child in _private.cells_of(cell).items() if recurse else ():
            if child is not None:
                yield from visit(_joined(prefix, name), child)

    return visit("", module)
