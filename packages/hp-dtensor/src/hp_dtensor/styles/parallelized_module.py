"""``parallelize_module``: a plan that says by patterns of names which module is laid out in which style."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hp_dtensor.creation import check_mesh
from hp_dtensor.module_tensors import keep_ties, mark_replaced, parameter_places, suggestion
from hp_platform import get_current_mesh, get_platform

Module = Any


def parallelize_module(
    module: Module,
    device_mesh: Any = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
) -> Module:
    """Apply parallel styles to a module and its sub-modules, in place. All ranks of the mesh call.

    Args:
        module: the root.
        device_mesh: where it is laid out; default: the current mesh (``with mesh:``). Styles take a mesh of one dim unless
            they say otherwise (``num_mesh_dims``): give ``mesh["tp"]`` of a larger one.
        parallelize_plan: a style for the module itself; or a dict from patterns to styles. A pattern is a dotted name whose
            parts may have wildcards, each for one level: ``"layers.*.attn.q_proj"``, ``"layers.[0-3].mlp"``; ``""`` is the
            module itself. A style is any object with ``apply(module, device_mesh)``: see
            :class:`hp_dtensor.ParallelStyle`. Entries are applied in their order; several may meet one module. A module that hangs in
            several places has all of their names, and gets a style once.
        src_data_rank: set on every style of the plan that is a :class:`ParallelStyle`: the rank along the mesh dim whose
            parameters count, or None: every rank's own.

    Returns the module, or what the style for the module itself put in its place. Without a plan there is a warning and the
    module stays as it is. The whole plan is checked before the first style is applied, modules included where styles can. A
    parameter in several places stays one parameter (:mod:`hp_dtensor.module_tensors`).

    Communication: that of the styles; with ``src_data_rank`` usually one scatter or broadcast per parameter. TypeError for a
    plan or value of another kind; ValueError for a pattern that meets no module (the message names close ones), for
    a mesh with another number of dims than a style takes, and for two styles that would both lay out one module's parameters.
    """
    mesh: Any = get_current_mesh() if device_mesh is None else device_mesh
    check_mesh(mesh)
    if not get_platform().is_module(module):
        raise TypeError(f"parallelize_module takes a module, got {type(module).__name__}")
    if parallelize_plan is None:
        warnings.warn("parallelize_module without parallelize_plan changes nothing", stacklevel=2)
        return module
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    for pattern, style in plan.items():
        _check_style(pattern, style, mesh)
    chosen = _chosen(module, plan)
    _check_modules(module, chosen, mesh)
    places = parameter_places(module)
    for name, style in chosen:
        with _naming(name):
            module = _apply(module, name, style, mesh, src_data_rank)
    keep_ties(places)
    mark_replaced(places, "parallelize_module")
    return module


def _chosen(root: Module, plan: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and styles in the order of the plan; of several names of a module that one style meets, the first."""
    found: dict[tuple[int, int], tuple[str, Any]] = {}
    for pattern, style in plan.items():
        for name in _matching(root, pattern):
            found.setdefault((id(get_platform().get_submodule(root, name)), id(style)), (name, style))
    return list(found.values())


def _apply(root: Module, name: str, style: Any, mesh: Any, src_data_rank: int | None) -> Module:
    from hp_dtensor.styles.parallel_style import ParallelStyle

    platform = get_platform()
    if isinstance(style, ParallelStyle):
        style.src_data_rank = src_data_rank
    # By name, and not by an object found before: an earlier style may have put another module there.
    target = platform.get_submodule(root, name)
    result = style.apply(target, mesh)
    if result is None or result is target:
        return root
    if not platform.is_module(result):
        raise TypeError(
            f"{type(style).__name__}.apply for {name!r} gave a {type(result).__name__}: return the module, or None"
        )
    if not name:
        return result
    for place in [
        path for path, each in platform.named_modules(root, remove_duplicate=False) if each is target
    ]:
        platform.set_submodule(root, place, result)
    return root


def _check_modules(root: Module, chosen: Sequence[tuple[str, Any]], mesh: Any) -> None:
    """Ask the styles that can tell whether they fit their modules, so that nothing has changed if one does not."""
    platform = get_platform()
    may_change: list[str] = []
    laid_out: dict[int, tuple[str, Any]] = {}
    for name, style in chosen:
        check = getattr(style, "check", None)
        if not callable(check):
            may_change.append(name)
        elif not any(_is_in(name, other) for other in may_change):
            module = platform.get_submodule(root, name)
            with _naming(name):
                check(module, mesh)
            lays_out = getattr(style, "lays_out", None)
            for each in lays_out(module) if callable(lays_out) else ():
                _check_alone(laid_out.setdefault(id(each), (name, style)), name, style, each)


def _check_alone(first: tuple[str, Any], name: str, style: Any, module: Module) -> None:
    """ValueError unless this entry is the first that lays out the module's parameters."""
    if first != (name, style):
        raise ValueError(
            f"{name!r}: {type(style).__name__} would lay out the parameters of a {type(module).__name__} that {type(first[1]).__name__} of "
            f"{first[0]!r} lays out before: let one entry of the plan meet it, by narrower patterns such as 'layers.[1-9].attn'"
        )


def _is_in(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let errors that tell of one module say its full name."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if name and len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (f"{name!r}: {error.args[0]}",)
        raise


def _check_style(pattern: Any, style: Any, mesh: Any) -> None:
    if not isinstance(pattern, str):
        raise TypeError(f"the keys of a parallelize_plan are patterns of names, got {pattern!r}")
    if isinstance(style, type) or not callable(getattr(style, "apply", None)):
        raise TypeError(
            f"parallelize_plan[{pattern!r}] must be a style, an object with apply(module, device_mesh), got {style!r}"
        )
    wanted = getattr(style, "num_mesh_dims", 1)
    if wanted is not None and len(mesh.shape) != wanted:
        raise ValueError(
            f"parallelize_plan[{pattern!r}]: {type(style).__name__} takes a mesh of {wanted} dim{'s' * (wanted != 1)}, got "
            f"{mesh} of shape {tuple(mesh.shape)}; slice it by name, such as mesh['tp']"
        )


def _matching(root: Module, pattern: str) -> list[str]:
    found = list(_walk(root, "", pattern.split(".") if pattern else []))
    if not found:
        known = [name for name, _ in get_platform().named_modules(root)]
        raise ValueError(
            f"parallelize_plan[{pattern!r}] meets no sub-module of {type(root).__name__}; {suggestion(pattern, known)}"
        )
    return found


def _walk(module: Module, prefix: str, parts: list[str]) -> Iterator[str]:
    if not parts:
        yield prefix
        return
    # Also the second name of a module that hangs in two places.
    for name, child in get_platform().named_modules(module, remove_duplicate=False):
        if name and "." not in name and fnmatch.fnmatchcase(name, parts[0]):
            yield from _walk(child, f"{prefix}.{name}" if prefix else name, parts[1:])
