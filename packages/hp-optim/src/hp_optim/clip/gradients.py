"""The gradients of some parameters as they lie on this rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor import DTensor, Partial, Replicate, Shard
from hp_dtensor.spec import Spec
from hp_optim.base import MAIN_GRAD
from hp_optim.checks import SUCCESSOR
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


@dataclass(slots=True)
class Gradient:
    """One gradient."""

    local: Tensor
    """What the parameter has, to be scaled in place."""
    spec: Spec | None
    """How ``part`` lies; None for a plain tensor."""
    part: Tensor
    """What is measured: ``local`` itself, but of a Partial this rank's piece of the reduced gradient."""
    is_product: bool = False
    """Whether ``local`` is a factor."""


Lists = dict[tuple[Any, str], list[Gradient]]
"""By dtype and device, which one call on a list of tensors must share."""


@dataclass(slots=True)
class Gradients:
    """What the parameters of a call have on this rank."""

    lists: Lists = field(default_factory=dict)
    specs: dict[Spec, None] = field(default_factory=dict)
    """Every way in which a parameter or a gradient lies, also of parameters without a gradient: all ranks know the same ones."""
    like: Tensor | None = None
    """The local tensor of the first parameter: on its device results are given."""
    is_double: bool = False
    """Whether a gradient, or a parameter without one, is float64."""


def gradients_of(platform: Platform, function: str, parameters: Any) -> Gradients:
    """The gradients of ``parameters``: a module, a tensor, or an iterable of tensors, of which a repeated one counts once.

    Communication: one reduction for each Partial gradient, all of them started before the first is waited for.
    ValueError for anything else, and for a gradient that does not fit its parameter.
    """
    found, double = Gradients(), platform.dtype("float64")
    partial: list[tuple[Gradient, Any]] = []
    wanted: dict[Spec | None, list[Any] | None] = {}
    names, given = _listed(platform, function, parameters)
    seen: set[int] = set()
    for place, parameter in enumerate(given):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        own: Spec | None = None
        local = parameter
        if isinstance(parameter, DTensor):
            own, local = parameter._spec, parameter._local
            found.specs[own] = None
        elif not platform.is_tensor(parameter):
            raise _no_parameter(platform, function, place, parameter)
        if found.like is None:
            found.like = local
        main = getattr(parameter, MAIN_GRAD, None)
        gradient = platform.get_grad(local) if main is None else main
        if gradient is None:
            if getattr(parameter, SUCCESSOR, None) is not None:
                raise _before_fully_shard(function, _name(names, place), parameter)
            found.is_double = found.is_double or local.dtype == double
            continue
        spec = None if own is None else own.grad
        if isinstance(gradient, DTensor):
            spec, gradient = gradient._spec, gradient._local
            found.specs[spec] = None
        elif type(gradient) is not platform.Tensor and hasattr(gradient, "to_local"):
            raise _foreign(function, _name(names, place), gradient)
        if main is not None:  # the shape of grad is the framework's concern
            _check_shape(function, _name(names, place), parameter, gradient, spec)
        entry = Gradient(gradient, spec, gradient)
        key = (gradient.dtype, platform.device_of(gradient))
        if key not in found.lists:
            _check_floating(platform, function, gradient)
            found.lists[key] = []
            found.is_double = found.is_double or gradient.dtype == double
        found.lists[key].append(entry)
        if spec not in wanted:
            wanted[spec] = None if spec is None else _reduced(spec)
        if wanted[spec] is not None:
            assert spec is not None
            entry.is_product = any(p.is_partial("prod") for p in spec.placements)
            partial.append(
                (entry, DTensor._wrap(gradient, spec).redistribute(placements=wanted[spec], async_op=True))
            )
    for entry, under_way in partial:
        reduced = under_way.wait()
        entry.part, entry.spec = reduced._local, reduced._spec
        found.specs[reduced._spec] = None
    return found


def refuse_sparse(function: str, lists: Lists) -> None:
    """ValueError if a gradient is sparse."""
    for gradient in (each for members in lists.values() for each in members):
        if getattr(gradient.local, "is_sparse", False):
            raise ValueError(
                f"{function}: a gradient of shape {tuple(gradient.local.shape)} is sparse; norms are taken of all elements: make the embedding "
                "with sparse=False, or leave its parameter out"
            )


def _listed(platform: Platform, function: str, parameters: Any) -> tuple[list[str] | None, list[Any]]:
    """Names where they are known, and parameters."""
    if platform.is_tensor(parameters):
        return None, [parameters]
    if platform.is_module(parameters):
        pairs = list(platform.named_parameters(parameters))
        return [name for name, _ in pairs], [parameter for _, parameter in pairs]
    if hasattr(parameters, "param_groups"):
        raise ValueError(
            f"{function}: got an optimizer ({type(parameters).__name__}); give the model, or the parameters of all groups: "
            "[p for group in optimizer.param_groups for p in group['params']]"
        )
    if isinstance(parameters, (str, bytes, Mapping)) or not isinstance(parameters, Iterable):
        raise ValueError(
            f"{function}: parameters is a {type(parameters).__name__}; it is a module of {platform.platform_type.value}, a tensor, or an "
            "iterable of tensors: give model.parameters()"
        )
    listed = list(parameters)
    if not listed and isinstance(parameters, Iterator):
        warnings.warn(
            f"{function}: the iterator gives no parameters; one that was used up before gives none, too: give model.parameters() anew, or "
            "an empty list if there are none here",
            stacklevel=5,
        )
    return None, listed


def _reduced(spec: Spec) -> list[Any] | None:
    """Where a Partial goes: each rank gets a piece where a tensor dim is uncut, which moves half of what the whole does. None: it
    is no Partial.
    """
    if not any(map(_is_partial, spec.placements)):
        return None
    uncut = [dim for dim, cuts in enumerate(spec.cuts) if not cuts]
    if not uncut:
        return [Replicate() if _is_partial(p) else p for p in spec.placements]
    largest = max(uncut, key=lambda dim: spec.shape[dim])
    return [Shard(largest) if _is_partial(p) else p for p in spec.placements]


def _is_partial(placement: Any) -> bool:
    return isinstance(placement, Partial)


def _name(names: list[str] | None, place: int) -> str:
    return f"parameter {place}" if names is None else f"parameter {names[place]!r}"


def _check_shape(function: str, name: str, parameter: Any, gradient: Tensor, spec: Spec | None) -> None:
    shape = tuple(parameter.shape)
    whole, piece = (shape, shape) if spec is None else (spec.shape, spec.local_shape)
    if whole != shape:
        raise ValueError(
            f"{function}: main_grad of {name} is a DTensor of shape {whole}, the parameter has shape {shape}: they must be equal"
        )
    if tuple(gradient.shape) != piece:
        raise ValueError(
            f"{function}: main_grad of {name} is a plain tensor of shape {tuple(gradient.shape)}, this rank's piece of the parameter has "
            f"shape {piece}: give the gradient of the piece, or a DTensor with distribute_tensor"
        )


def _check_floating(platform: Platform, function: str, gradient: Tensor) -> None:
    if not platform.is_floating(gradient.dtype):
        raise ValueError(
            f"{function}: a gradient of shape {tuple(gradient.shape)} has dtype {platform.dtype_name(gradient.dtype)}; norms are taken of "
            "floating-point gradients: leave its parameter out"
        )


def _no_parameter(platform: Platform, function: str, place: int, given: Any) -> ValueError:
    kind = type(given)
    if isinstance(given, tuple):
        hint = "give model.parameters(), not model.named_parameters()"
    elif isinstance(given, Mapping):
        hint = "give the parameters of all groups: [p for group in groups for p in group['params']]"
    else:
        hint = f"parameters are tensors of the one framework of this process, {platform.platform_type.value}: leave it out"
    return ValueError(f"{function}: parameters[{place}] is a {kind.__module__}.{kind.__qualname__}; {hint}")


def _before_fully_shard(function: str, name: str, parameter: Any) -> ValueError:
    return ValueError(
        f"{function}: {name}, of shape {tuple(parameter.shape)}, is a parameter from before fully_shard, which the model does not use any "
        "more and which never gets a gradient: give model.parameters() as they are after fully_shard"
    )


def _foreign(function: str, name: str, gradient: Any) -> ValueError:
    kind = type(gradient)
    return ValueError(
        f"{function}: the gradient of {name} is a {kind.__module__}.{kind.__qualname__}, which is no hp_dtensor.DTensor: make the "
        "parameter one with DTensor.from_torch, or clip with the library that it comes from"
    )
