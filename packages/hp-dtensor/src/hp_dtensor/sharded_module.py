"""``shard_module``: parameters, inputs and outputs of a module or function laid out by a plan."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hp_dtensor.creation import check_mesh, distribute_tensor
from hp_dtensor.doors import InputDoor, OutputDoor, Signature, signature_of
from hp_dtensor.module_tensors import (
    Place,
    is_dtensor,
    mark_replaced,
    parameter_places,
    put_parameter,
    suggestion,
    tied_places,
)
from hp_dtensor.placements import Partial
from hp_dtensor.sharding_plan import (
    INPUT,
    OUTPUT,
    ShardingPlan,
    Wish,
    meshes_in,
    module_of,
    read_wish,
    read_wishes,
    without_self,
)
from hp_platform import get_current_mesh, get_platform

M = TypeVar("M")
Module = Any
_PLACED = "_hp_dtensor_placed"
"""Attribute of a module: at which of its doors a hook of ours stands."""


def shard_module(model: M, device_mesh: Any = None, sharding_plan: Any = None) -> M:
    """Lay out a module's parameters, inputs and outputs by a plan, in place. All ranks of the mesh call.

    Parameters become DTensors that hold this rank's piece of the parameter's own values, which must be equal on all ranks;
    shared parameters stay shared. Arguments and results that are DTensors are redistributed when the module is called;
    plain tensors and None pass.

    Args:
        model: a module, returned itself; or a function: then a function that does the same around the call is returned.
        device_mesh: where things lie; default: that of the plan's Layouts, else the current mesh (``with mesh:``).
        sharding_plan: a :class:`hp_dtensor.ShardingPlan`; or a dict ``{"parameter": {name: spec}, "forward": {"input":
            ..., "output": ...}}``, which may also come second, without a mesh.

    On a mesh of one rank nothing is to be laid out: the plan is checked and the model returned as it is, but for results
    that are asked for as local tensors.

    The doors of a module are planned once: a second plan for the same inputs or outputs is refused, and changes nothing.

    Communication: none here; in calls what the redistribution of the arguments and results needs. Raises TypeError for a
    plan of another kind, ValueError for names, specs and numbers that do not fit, and for a parameter that is a DTensor
    already, RuntimeError for a door that is planned already. A plan without any entry warns.
    """
    if sharding_plan is None and isinstance(device_mesh, (Mapping, ShardingPlan)):
        device_mesh, sharding_plan = None, device_mesh
    plan = _plan_of(sharding_plan)
    mesh = _mesh_of(device_mesh, plan)
    if not get_platform().is_module(model):
        return _around_function(model, mesh, plan)
    _Sharding(model, mesh, plan).apply()
    if not (plan.plan or plan.input_plan or plan.output_plan or plan.return_local_tensor):
        warnings.warn(
            "shard_module got a plan without any entry, so nothing is laid out: name parameters, inputs or outputs in it",
            stacklevel=2,
        )
    return model


def _plan_of(given: Any) -> ShardingPlan:
    if isinstance(given, ShardingPlan):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"shard_module takes a ShardingPlan, or a dict with 'parameter' and 'forward', got {given!r}"
        )
    forward = given.get("forward", {})
    unknown = [key for key in given if key not in ("parameter", "forward")]
    if unknown or not isinstance(forward, Mapping):
        raise ValueError(
            f"a plan as a dict has the keys 'parameter' (name -> spec) and 'forward' (a dict with 'input' and 'output'), got "
            f"{unknown[0] if unknown else forward!r}; specs by the names of parameters are ShardingPlan(plan=...)"
        )
    inputs = {key: value for key, value in forward.items() if not _is_door(key, OUTPUT)}
    outputs = {key: value for key, value in forward.items() if _is_door(key, OUTPUT)}
    return ShardingPlan(given.get("parameter"), inputs, outputs)


def _is_door(key: str, door: str) -> bool:
    return key.rpartition(".")[2] == door


def _mesh_of(given: Any, plan: ShardingPlan) -> Any:
    if given is None:
        of_layouts = meshes_in([plan.plan, plan.input_plan, plan.output_plan])
        return of_layouts[0] if of_layouts else get_current_mesh()
    check_mesh(given)
    return given


class _Sharding:
    """One call: everything is read and checked before anything is changed."""

    def __init__(self, model: Module, mesh: Any, plan: ShardingPlan) -> None:
        self.mesh = mesh
        self.modules = dict(get_platform().named_modules(model))
        self.parameters = self._read_parameters(model, plan.plan or {})
        self.inputs = self._read_inputs(plan.input_plan or {})
        self.outputs = self._read_outputs(plan)

    def apply(self) -> None:
        """Change the model."""
        platform = get_platform()
        if self.mesh.size() > 1:
            for places, wish in self.parameters:
                put_parameter(places, distribute_tensor(places[0].tensor, self.mesh, wish.placements))
                mark_replaced(places, "shard_module")
            for name, before in self.inputs.items():
                platform.register_forward_pre_hook(self.modules[name], before)
                self._note(name, INPUT)
        for name, after in self.outputs.items():
            if self.mesh.size() == 1 and not after.localize:
                continue
            platform.register_forward_hook(self.modules[name], after)
            self._note(name, OUTPUT)

    def _note(self, name: str, door: str) -> None:
        module = self.modules[name]
        setattr(module, _PLACED, {*getattr(module, _PLACED, ()), door})

    # ------------------------------------------------------------------------------------------------------------ reading
    def _read_parameters(self, model: Module, plan: Mapping[str, Any]) -> list[tuple[list[Place], Wish]]:
        places = parameter_places(model)
        known = {place.name: place for place in places}
        found = []
        for group in tied_places(places):
            names = [place.name for place in group]
            asked = [(key, value) for key, value in plan.items() if without_self(key) in names]
            if not asked:
                continue
            wishes = [self._read_parameter(key, group[0].tensor, value) for key, value in asked]
            differing = [key for (key, _), wish in zip(asked, wishes, strict=True) if wish != wishes[0]]
            if differing:
                raise ValueError(
                    f"{asked[0][0]!r} and {differing[0]!r} are one parameter, but their specs differ: give both the same, or "
                    f"one of them only"
                )
            found.append((group, wishes[0]))
        for key in plan:
            if without_self(key) not in known:
                raise ValueError(f"the module has no parameter {key!r}; {suggestion(key, known)}")
        return found

    def _read_parameter(self, key: str, parameter: Any, value: Any) -> Wish:
        what = f"plan[{key!r}]"
        if is_dtensor(parameter):
            raise ValueError(f"{what}: the parameter is a DTensor already, {parameter._spec}")
        wish = read_wish(value, self.mesh, what)
        wish.spec_for(tuple(parameter.shape), what)
        if any(isinstance(placement, Partial) for placement in wish.placements):
            raise ValueError(f"{what}: a parameter cannot be a sum; give Shard or Replicate")
        return wish

    def _read_inputs(self, plan: Mapping[str, Any]) -> dict[str, InputDoor]:
        doors = {}
        for key, value in plan.items():
            name = self._module_at(module_of(key, INPUT), f"input_plan[{key!r}]", INPUT)
            wishes = read_wishes(value, self.mesh, f"input_plan[{key!r}]")
            door = InputDoor(
                f"the input of {_shown(name)}", wishes, signature_of(_forward_of(self.modules[name]))
            )
            door.check()
            doors[name] = door
        return doors

    def _read_outputs(self, plan: ShardingPlan) -> dict[str, OutputDoor]:
        wishes, local = {}, set()
        for key, value in (plan.output_plan or {}).items():
            name = self._module_at(module_of(key, OUTPUT), f"output_plan[{key!r}]", OUTPUT)
            wishes[name] = read_wishes(value, self.mesh, f"output_plan[{key!r}]")
        for key in plan.return_local_tensor or ():
            local.add(self._module_at(without_self(key), "return_local_tensor", OUTPUT))
        return {
            name: OutputDoor(f"the output of {_shown(name)}", wishes.get(name), name in local)
            for name in self.modules
            if name in wishes or name in local
        }

    def _module_at(self, name: str, what: str, door: str) -> str:
        if name not in self.modules:
            raise ValueError(f"{what}: there is no sub-module {name!r}; {suggestion(name, self.modules)}")
        if door in getattr(self.modules[name], _PLACED, ()):
            raise RuntimeError(
                f"{what}: the {door} of {_shown(name)} is planned already by an earlier shard_module: make one plan of both"
            )
        return name


def _shown(name: str) -> str:
    return repr(name) if name else "the module itself"


def _forward_of(module: Module) -> Callable[..., Any]:
    """What runs when the module is called; frameworks name it differently."""
    found: Callable[..., Any] = next(
        getattr(module, name) for name in ("forward", "construct") if hasattr(module, name)
    )
    return found


# --------------------------------------------------------------------------------------------------------------- functions
def _around_function(function: Any, mesh: Any, plan: ShardingPlan) -> Any:
    if not callable(function):
        raise TypeError(f"shard_module takes a module or a function, got {type(function).__name__}")
    name = getattr(function, "__qualname__", repr(function))
    if plan.plan:
        raise ValueError(f"{name} is a function and has no parameter {next(iter(plan.plan))!r}")
    for key, door in [
        *((k, INPUT) for k in plan.input_plan or ()),
        *((k, OUTPUT) for k in plan.output_plan or ()),
    ]:
        if module_of(key, door):
            raise ValueError(f"{name} is a function and has no sub-module for {key!r}: use {door!r}")
    for local in plan.return_local_tensor or ():
        if local:
            raise ValueError(f"{name} is a function and has no sub-module {local!r}: use ''")
    signature: Signature = signature_of(function)
    before = InputDoor(name, read_wishes((plan.input_plan or {}).get(INPUT), mesh, "input_plan"), signature)
    before.check()
    wishes = read_wishes((plan.output_plan or {}).get(OUTPUT), mesh, "output_plan")
    after = OutputDoor(name, wishes, bool(plan.return_local_tensor))

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        if mesh.size() == 1:
            return after.adjusted(function(*args, **kwargs)) if after.localize else function(*args, **kwargs)
        args, kwargs = before.adjusted(args, kwargs)
        return after.adjusted(function(*args, **kwargs))

    return placed
