"""Styles that move what goes into a module and what comes out of it, and touch no parameter.

Layouts are written as in torch.distributed.tensor.parallel: a placement for a module with one tensor, else a tuple with a
placement per tensor; None leaves a tensor alone. On a mesh of several dims an entry is a tuple with one placement per mesh
dim, also for a single tensor: ``((Shard(0), Replicate()),)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.nest import rebuilt
from hp_dtensor.placements import Placement
from hp_dtensor.styles.parallel_style import ParallelStyle
from hp_platform import get_platform

Layouts: TypeAlias = "Placement | Sequence[Any] | None"
Entry: TypeAlias = "tuple[Placement, ...] | None"


class PrepareModuleInput(ParallelStyle):
    """Bring a module's inputs to the placements that it wants.

    Args:
        input_layouts: how the positional arguments lie when they come: plain tensors are taken for this rank's piece; DTensors
            know it themselves. None (default): positional arguments are left alone.
        desired_input_layouts: how they shall lie in forward. As many as ``input_layouts``.
        input_kwarg_layouts: argument's name -> how it lies when it comes. Names that a call does not give are no error.
        desired_input_kwarg_layouts: argument's name -> how it shall lie; the same names.
        use_local_output: whether forward gets local tensors (default: DTensors).

    Communication, at every call: what the redistribution needs; for a plain piece of a cut tensor also one gather of its
    sizes (``DTensor.from_local``). ValueError for layouts that do not fit each other; at the call for another number of
    arguments, or something else than a tensor where a layout is given.
    """

    num_mesh_dims = None

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _entries(input_layouts, "input_layouts")
        self.desired_input_layouts = _entries(desired_input_layouts, "desired_input_layouts")
        _check_pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        self.input_kwarg_layouts = _named_entries(input_kwarg_layouts, "input_kwarg_layouts")
        self.desired_input_kwarg_layouts = _named_entries(
            desired_input_kwarg_layouts, "desired_input_kwarg_layouts"
        )
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"input_kwarg_layouts has the names {sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}: they must be the same"
            )
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: Any) -> Any:
        """Put a hook before the module's forward."""
        get_platform().register_forward_pre_hook(
            module, _InputHook(self, device_mesh, type(module).__name__).prepare
        )
        return module


class PrepareModuleOutput(ParallelStyle):
    """Bring a module's outputs to other placements.

    Args:
        output_layouts: how the outputs lie when they come: plain tensors are taken for this rank's piece.
        desired_output_layouts: how they shall lie. As many as ``output_layouts``.
        use_local_output: whether local tensors are handed out (default), or DTensors.

    Communication and errors: as :class:`PrepareModuleInput`.
    """

    num_mesh_dims = None

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        given = _entries(output_layouts, "output_layouts")
        wanted = _entries(desired_output_layouts, "desired_output_layouts")
        if given is None or wanted is None:
            raise ValueError("output_layouts and desired_output_layouts are needed, got None")
        _check_pairs("output_layouts", given, wanted)
        self.output_layouts, self.desired_output_layouts = given, wanted
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: Any) -> Any:
        """Put a hook after the module's forward."""
        get_platform().register_forward_hook(
            module, _OutputHook(self, device_mesh, type(module).__name__).prepare
        )
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` of one module, with their arguments.

    ``use_local_input`` (default False) says whether forward gets local tensors, ``use_local_output`` (default True) whether
    they are handed out.
    """

    num_mesh_dims = None

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: Any, device_mesh: Any) -> Any:
        """Put a hook before and one after the module's forward."""
        return self.prepare_output.apply(self.prepare_input.apply(module, device_mesh), device_mesh)


# ------------------------------------------------------------------------------------------------------------------- hooks
@dataclass(frozen=True)
class _InputHook:
    """One module's hook: an object and no closure, so that modules can be copied."""

    style: PrepareModuleInput
    mesh: Any
    module_name: str

    def prepare(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        style = self.style
        if style.input_layouts is not None and style.desired_input_layouts is not None:
            if len(args) != len(style.input_layouts):
                raise ValueError(
                    f"{self.module_name} got {len(args)} positional arguments for {len(style.input_layouts)} input_layouts: "
                    f"give one layout per argument, None for those to leave alone"
                )
            args = tuple(
                _prepared(
                    x, given, wanted, self.mesh, style.use_local_output, f"argument {i} of {self.module_name}"
                )
                for i, (x, given, wanted) in enumerate(
                    zip(args, style.input_layouts, style.desired_input_layouts, strict=True)
                )
            )
        kwargs = {
            name: _prepared(
                x,
                style.input_kwarg_layouts.get(name),
                style.desired_input_kwarg_layouts.get(name),
                self.mesh,
                style.use_local_output,
                f"argument {name!r} of {self.module_name}",
            )
            for name, x in kwargs.items()
        }
        return args, kwargs


@dataclass(frozen=True)
class _OutputHook:
    style: PrepareModuleOutput
    mesh: Any
    module_name: str

    def prepare(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        style = self.style
        is_many = isinstance(output, (list, tuple))
        values = list(output) if is_many else [output]
        if len(values) != len(style.output_layouts):
            raise ValueError(
                f"{self.module_name} gave {len(values)} outputs for {len(style.output_layouts)} output_layouts: give one "
                f"layout per output, None for those to leave alone"
            )
        values = [
            _prepared(
                x, given, wanted, self.mesh, style.use_local_output, f"output {i} of {self.module_name}"
            )
            for i, (x, given, wanted) in enumerate(
                zip(values, style.output_layouts, style.desired_output_layouts, strict=True)
            )
        ]
        return rebuilt(output, values) if is_many else values[0]


def _prepared(x: Any, given: Entry, wanted: Entry, mesh: Any, use_local: bool, what: str) -> Any:
    """A plain piece or a DTensor as a DTensor in the wanted placements, or its local tensor."""
    from hp_dtensor.native import DTensor

    if x is None or given is None:
        return x
    if not is_dtensor(x):
        if not get_platform().is_tensor(x):
            raise ValueError(
                f"{what} has a layout, but is a {type(x).__name__}: layouts are for tensors, None leaves alone"
            )
        x = DTensor.from_local(x, mesh, given)
    elif x.device_mesh != mesh:
        raise ValueError(f"{what} lies on {x.device_mesh}, but the style was applied on {mesh}")
    if wanted is not None:
        x = x.redistribute(placements=wanted)
    return x.to_local() if use_local else x


# ----------------------------------------------------------------------------------------------------------------- layouts
def _entries(layouts: Layouts, what: str) -> tuple[Entry, ...] | None:
    if layouts is None:
        return None
    if isinstance(layouts, Placement):
        return ((layouts,),)
    if isinstance(layouts, str) or not isinstance(layouts, Sequence):
        raise ValueError(
            f"{what} takes a placement or a tuple with one per tensor, got {layouts!r}; by the names of arguments they go to "
            f"input_kwarg_layouts"
        )
    return tuple(_entry(layout, f"{what}[{i}]") for i, layout in enumerate(layouts))


def _entry(layout: Any, what: str) -> Entry:
    if layout is None:
        return None
    if isinstance(layout, Placement):
        return (layout,)
    if isinstance(layout, Sequence) and layout and all(isinstance(p, Placement) for p in layout):
        return tuple(layout)
    raise ValueError(
        f"{what} must be a placement, a tuple with one placement per mesh dim, or None, got {layout!r}"
    )


def _named_entries(layouts: Mapping[str, Any] | None, what: str) -> dict[str, Entry]:
    if layouts is None:
        return {}
    if not isinstance(layouts, Mapping):
        raise ValueError(f"{what} takes a dict from names of arguments to placements, got {layouts!r}")
    return {name: _entry(layout, f"{what}[{name!r}]") for name, layout in layouts.items()}


def _check_pairs(name: str, given: Sequence[Any] | None, wanted: Sequence[Any] | None) -> None:
    if given is None and wanted is None:
        return
    if given is None or wanted is None or len(given) != len(wanted):
        counts = ["none" if side is None else str(len(side)) for side in (given, wanted)]
        raise ValueError(
            f"{name} has {counts[0]} entries, desired_{name} {counts[1]}: give as many of one as of the other"
        )
