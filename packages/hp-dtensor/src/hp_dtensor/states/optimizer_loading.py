"""How the values of a dict become the state and the hyperparameters of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from hp_dtensor.creation import distribute_tensor
from hp_dtensor.native import DTensor
from hp_dtensor.placements import REPLICATE
from hp_dtensor.states.broadcast import Announced, Home, send
from hp_dtensor.states.optimizer_names import PARAM_NAMES, PARAMS, STEP, NamedOptimizer, check_flat
from hp_dtensor.states.options import IncompatibleKeys
from hp_dtensor.states.values import (
    check_reachable,
    check_value,
    copy_on,
    is_frozen,
    like,
    piece_of,
    whole_of,
    write,
)
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

STATE: Final = "state"
GROUPS: Final = "param_groups"
OFFLOAD_STATE: Final = "offload_state"
"""Hyperparameter of optimizers that keep their state in the host's memory."""
HOW_IT_RUNS: Final = frozenset({"foreach", "fused", "capturable", "differentiable", OFFLOAD_STATE})
"""Hyperparameters that change no value: they stay as this optimizer was made."""

Key = tuple[Any, ...]
"""(STATE, name, key) or (GROUPS, number, key)."""


def flat(platform: Platform, state_dict: Any) -> dict[Key, Any]:
    """All values of a dict by their keys. ValueError for what is no state of an optimizer by names."""
    if not isinstance(state_dict, Mapping) or not {STATE, GROUPS} <= set(state_dict):
        given = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"the state dict of an optimizer has {STATE!r} and {GROUPS!r}, as get_optimizer_state_dict makes it; got {given}"
        )

    def unwrapped(name: Any) -> Any:
        return platform.unwrapped_name(name) if isinstance(name, str) else name

    found: dict[Key, Any] = {}
    for number, group in enumerate(state_dict[GROUPS]):
        for key, value in group.items():
            found[GROUPS, number, key] = [unwrapped(name) for name in value] if key == PARAMS else value
    for name, entry in state_dict[STATE].items():
        for key, value in entry.items():
            found[STATE, unwrapped(name), key] = value
    for key, value in found.items():
        if key[2] != PARAMS:
            check_flat(platform, f"{key[1]}/{key[2]}", value)
    wrong = [name for name in (*state_dict[STATE], *_names(found)) if not isinstance(name, str)]
    if wrong:
        raise ValueError(
            f"the state dict has the parameter {wrong[0]!r}; parameters stand by their names here: make it with "
            "get_optimizer_state_dict instead of the optimizer's own state_dict()"
        )
    return found


def _names(given: Mapping[Key, Any]) -> list[Any]:
    return [
        name for (part, _, key), value in given.items() if part == GROUPS and key == PARAMS for name in value
    ]


class Loading:
    """One dict on its way into an optimizer. Its tensors may still be :class:`Announced`."""

    def __init__(self, platform: Platform, named: NamedOptimizer, given: Mapping[Key, Any]) -> None:
        self.platform = platform
        self.named = named
        self.given = given
        self.group_of: dict[int, int] = {}
        """Of the id of a parameter: the number of the dict's group that has it."""
        for (part, number, key), names in given.items():
            if part == GROUPS and key == PARAMS:
                for name in filter(named.has, names):
                    self.group_of[id(named.parameters[name])] = number
        self._entries: dict[int, dict[str, Any]] = {}

    def compared(self, *, ignore_frozen: bool) -> IncompatibleKeys:
        """Names of parameters that only the optimizer has, and those that only the dict has."""
        named = self.named
        states = [name for part, name, _ in self.given if part == STATE]
        told = dict.fromkeys([*_names(self.given), *states])
        reached = {id(named.parameters[name]) for name in told if named.has(name)}
        missing = [
            name
            for name in named.names()
            if id(named.parameters[name]) not in reached
            and not (ignore_frozen and is_frozen(named.parameters, name))
        ]
        return IncompatibleKeys(missing, [name for name in told if not named.has(name)])

    # --- checks
    def check(self) -> None:
        """ValueError for tensors and groups that do not fit. No communication."""
        for index, (_, group) in enumerate(self.named.groups):
            numbers = {self.group_of[id(p)] for p in group[PARAMS] if id(p) in self.group_of}
            if len(numbers) > 1:
                names = [self.named.name_of(p) for p in group[PARAMS]]
                raise ValueError(
                    f"group {index} of the optimizer ({', '.join(names)}) has parameters of the groups {sorted(numbers)} of "
                    "the state dict: make groups of the same parameters as when it was saved"
                )
        for key, value in self.given.items():
            if not self._is_tensor(value):
                continue
            if key[0] == STATE and self.named.has(key[1]):
                self._check_tensor(key, value)
            elif key[0] == GROUPS:
                for group in self._groups_from(key[1]):
                    if self.platform.is_tensor(group.get(key[2])):
                        check_value(self.platform, f"hyperparameter {key[2]}", value, group[key[2]])

    def _check_tensor(self, key: Key, value: Any) -> None:
        parameter, present = self.named.parameters[key[1]], self._present(key)
        if self.platform.is_tensor(present):
            check_value(self.platform, f"{key[1]}/{key[2]}", value, present)
        elif isinstance(value, DTensor) and tuple(value.shape) == tuple(parameter.shape):
            check_reachable(f"{key[1]}/{key[2]}", value, parameter)

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, Announced) or self.platform.is_tensor(value)

    def _present(self, key: Key) -> Any:
        """What the optimizer has there; None if it has nothing."""
        parameter = self.named.parameters[key[1]]
        owner, _ = self.named.owners[id(parameter)]
        return (owner.state.get(parameter) or {}).get(key[2])

    # --- writes
    def load(self, mine: Mapping[Key, Any], home: Home | None) -> None:
        """Write everything. ``mine`` has the tensors that were announced, on the rank that has them."""
        for part, name, key in self.given:
            if part == STATE and self.named.has(name):
                # Keys first, so that they keep their order.
                self._entries.setdefault(id(self.named.parameters[name]), {})[key] = None
        for key, value in self.given.items():
            if not isinstance(value, Announced):
                self._take([key], value)
        if home is not None:
            send(self.platform, self.given, mine, home, self._take)
        for owner, group in self.named.groups:
            for parameter in group[PARAMS]:
                if id(parameter) in self._entries:
                    owner.state[parameter] = self._entries[id(parameter)]
                elif id(parameter) in self.group_of:
                    owner.state.pop(parameter, None)

    def _take(self, keys: list[Key], value: Any) -> None:
        for key in keys:
            part, name, last = key
            if part == GROUPS:
                self._take_hyperparameter(key, value)
            elif self.named.has(name):
                self._entries[id(self.named.parameters[name])][last] = self._entry(key, value)

    def _take_hyperparameter(self, key: Key, value: Any) -> None:
        platform, (_, number, name) = self.platform, key
        if name in (PARAMS, PARAM_NAMES) or name in HOW_IT_RUNS:
            return
        for group in self._groups_from(number):
            present = group.get(name)
            if is_function(platform, present):
                continue  # no dict has one: what it has instead was said to an optimizer that had none
            if not platform.is_tensor(present):
                group[name] = self._own(value)
            elif platform.is_tensor(value):
                write(platform, present, piece_of(platform, value, present))
            else:
                platform.fill_(present, value)

    def _groups_from(self, number: int) -> list[dict[str, Any]]:
        """The optimizer's groups whose parameters are in this group of the dict."""
        return [
            group
            for _, group in self.named.groups
            if any(self.group_of.get(id(parameter)) == number for parameter in group[PARAMS])
        ]

    def _own(self, value: Any) -> Any:
        """The value, in memory that it does not share with the dict."""
        if self.platform.is_tensor(value):
            return copy_on(self.platform, value, self.platform.device_of(value))
        return copy.deepcopy(value)

    def _entry(self, key: Key, value: Any) -> Any:
        """What the optimizer shall have there: the tensor that it has, written, or a new one."""
        platform, present = self.platform, self._present(key)
        if not platform.is_tensor(value):
            if platform.is_tensor(present) and isinstance(value, (int, float)):
                return platform.fill_(present, value)
            return value
        if platform.is_tensor(present):
            write(platform, present, piece_of(platform, value, present))
            return present
        if isinstance(present, (int, float)):
            return platform.to_numpy(platform.detach(value)).item()
        return self._new(key, value)

    def _new(self, key: Key, value: Tensor) -> Tensor:
        platform, parameter = self.platform, self.named.parameters[key[1]]
        if not isinstance(parameter, DTensor):
            device = self._home(parameter, platform.device_of(parameter))
            value = whole_of(platform, value) if isinstance(value, DTensor) else value
            return copy_on(platform, value, self._device(key, parameter, device))
        device = self._home(parameter, platform.device_of(parameter.to_local()))
        shape, whole = tuple(value.shape), tuple(parameter.shape)
        is_sharded = isinstance(value, DTensor)
        if not is_sharded and (key[2] == STEP or (shape == () and whole != ())):
            return copy_on(platform, value, self._device(key, parameter, device))
        if shape == whole or (not is_sharded and shape == tuple(parameter.local_shape)):
            return like(parameter, copy_on(platform, piece_of(platform, value, parameter), device))
        if not is_sharded:
            mesh = parameter.device_mesh
            value = distribute_tensor(platform.detach(value), mesh, [REPLICATE] * mesh.ndim)
        return copy_on(platform, value, device)

    def _home(self, parameter: Any, device: str) -> str:
        """Where the state of a parameter on ``device`` lies: the device may have no room for what its optimizer keeps on the host."""
        _, group = self.named.owners[id(parameter)]
        return "cpu" if group.get(OFFLOAD_STATE) and device != "meta" else device

    def _device(self, key: Key, parameter: Any, device: str) -> str:
        """Where a plain tensor lies. torch's optimizers count steps on the host, to read the count without waiting for the
        device, unless they are told to run on the device altogether.
        """
        _, group = self.named.owners[id(parameter)]
        on_host = key[2] == STEP and not (group.get("fused") or group.get("capturable"))
        return "cpu" if on_host else device


def is_function(platform: Platform, value: Any) -> bool:
    """Whether a hyperparameter is a function: it is in no dict, and stays when one is loaded."""
    return (
        callable(value) and not platform.is_tensor(value) and not isinstance(value, dtype_classes(platform))
    )


def dtype_classes(platform: Platform) -> tuple[type, ...]:
    """Of which dtypes are. On MindSpore there is a class for each kind of numbers."""
    return tuple({type(platform.dtype(name)) for name in ("float32", "bfloat16", "int64")})
