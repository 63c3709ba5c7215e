"""What a module can do after ``fully_shard``: its class is exchanged, so that it keeps its name in the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_fsdp.unit import UNIT_ATTRIBUTE, Unit, unit_of, units_in
from hp_platform.platform import get_platform

CLASS_ATTRIBUTE = "_hp_fsdp_class"
"""Where a class of modules keeps the generated one: it belongs to that class, and goes with it."""


class HSDPModule:
    """Mixed into the class of every module that ``fully_shard`` was called on. Not to be instantiated."""

    def unshard(self) -> None:
        """Gather this unit's parameters now, and let the module show them whole, until :meth:`reshard` or the next forward's end.

        That forward finds them there. Writing to whole parameters changes nothing: the shards count.
        Communication: one all-gather per compute dtype over the shard group; all its ranks must call.
        """
        unit = _unit(self)
        unit.show()
        unit.gathered_in_pass = None

    def reshard(self) -> None:
        """Free this unit's whole parameters and let the module show its shards. Without effect if it does. No communication."""
        _unit(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward reduces gradients, in this unit and all inside of it (default True).

        With False they are kept whole, in the dtype of the reduction (memory of all gradients), until a backward with True
        reduces the sum once: gradient accumulation. ``.grad`` of the shards changes only then. All ranks must agree.
        ValueError for anything but a bool. No communication.
        """
        flag = _flag("requires_gradient_sync", requires_gradient_sync)
        for unit in units_in(get_platform(), self):
            unit.sync_gradients = flag

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are freed between forward and backward, in this unit and (``recurse``) all inside of it.

        Said here, it also counts for the root, which otherwise keeps its own. Forward without gradients always frees.
        ValueError for anything but a bool. No communication.
        """
        flag = _flag("reshard_after_forward", reshard_after_forward)
        for unit in units_in(get_platform(), self) if _flag("recurse", recurse) else [_unit(self)]:
            unit.reshard_as_told = flag

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in this module, also those that wait whole for a synchronisation.

        ``set_to_none`` False: fill them with zeros. No communication.
        """
        platform = get_platform()
        cleared = set()
        for unit in units_in(platform, self):
            for managed in unit.params:
                managed.unsynced = None
                platform.set_grad(managed.full, None)
                _clear(managed.shard, set_to_none)
                cleared.add(id(managed.parameter))
            unit.owes_sync = False
        for _, parameter in platform.named_parameters(self):
            if id(parameter) not in cleared:
                _clear(parameter, set_to_none)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """:func:`hp_fsdp.set_model_state_dict` of this module."""
        from hp_fsdp.state import StateDictOptions, set_model_state_dict

        return set_model_state_dict(self, state_dict, options=StateDictOptions(strict=strict))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: a copy would not know its unit, and would hold shards that nobody gathers."""
        raise RuntimeError(
            f"a module cannot be copied or pickled after fully_shard ({type(self).__name__}): copy it before, and save "
            "get_model_state_dict(model) instead of the module"
        )


def become_sharded(module: Any, unit: Unit) -> None:
    """Let the module be an :class:`HSDPModule` of ``unit``."""
    original = type(module)
    # Looked up in the class itself: a generated class must not serve for classes derived from it.
    generated = vars(original).get(CLASS_ATTRIBUTE)
    if generated is None:
        generated = type(
            f"HSDP{original.__name__}", (HSDPModule, original), {"__module__": original.__module__}
        )
        setattr(original, CLASS_ATTRIBUTE, generated)
    setattr(module, UNIT_ATTRIBUTE, unit)
    module.__class__ = generated


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"{type(module).__name__} has no unit: fully_shard it first")
    return unit


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"{name} must be True or False, got {given!r}")
    return given


def _clear(parameter: Any, set_to_none: bool) -> None:
    platform = get_platform()
    gradient = platform.get_grad(parameter)
    if gradient is None:
        return
    if set_to_none:
        platform.set_grad(parameter, None)
    else:
        platform.fill_(gradient, 0.0)
