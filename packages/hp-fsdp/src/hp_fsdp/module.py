"""What a module can do after ``fully_shard``: its class is exchanged, so that it keeps its name in the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_fsdp.roots import context_of
from hp_fsdp.unit import UNIT_ATTRIBUTE, Unit, unit_of, units_in
from hp_platform.platform import get_platform

CLASS_ATTRIBUTE = "_hp_fsdp_class"
"""Where a class of modules keeps the generated one: it belongs to that class, and goes with it."""


class UnshardHandle:
    """An all-gather that ``HSDPModule.unshard(async_op=True)`` has begun."""

    def __init__(self, unit: Unit) -> None:
        self._units: Sequence[Unit] = (unit, *unit.parts)

    def wait(self) -> None:
        """Let the module show its whole parameters, ready for what the computation does next. Again: nothing."""
        for unit in self._units:
            unit.show()
        self._units = ()


class HSDPModule:
    """Mixed into the class of every module that ``fully_shard`` was called on. Not to be instantiated."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call. Whoever catches an exception of it finds shards."""
        hooks = getattr(self, UNIT_ATTRIBUTE).hooks
        last_pass = hooks.last_pass()
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            hooks.failed(self, last_pass)
            raise

    # --- whole parameters by hand
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, and let the module show them whole, until :meth:`reshard` or the next forward's end.

        That forward finds them there. Writing to whole parameters changes nothing: the shards count. With ``async_op`` the
        gather runs beside what follows, and the handle's ``wait()`` shows the parameters; else None is returned.
        ValueError unless ``async_op`` is a bool.
        Communication: one all-gather per compute dtype over the shard group (for the root also for each of its large layers, see
        :func:`hp_fsdp.fully_shard`); all its ranks must call. None if they are there, and the shards were not written since.
        """
        unit = _unit(self)
        is_async = _flag("async_op", async_op)
        runs = context_of(unit).runs
        for each in (unit, *unit.parts):
            each.hooks.check_values()
            if not runs and each.is_outdated():
                each.reshard()
            each.launch_gather()
            each.gathered_in_pass = None
        handle = UnshardHandle(unit)
        if is_async:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's whole parameters and let the module show its shards. Without effect if it does. No communication.

        After a backward that ended with an exception, reductions that are under way are waited for first, as by :meth:`zero_grad`.
        """
        unit = _unit(self)
        if unit.context is not None:
            unit.context.forget_dead_backward()
        for each in (unit, *unit.parts):
            each.reshard()

    # --- gradients
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, in this unit and (``recurse``) all inside of it (default True).

        With False they are kept whole, in the dtype of the reduction (memory of all gradients), until a backward with True
        reduces the sum once: gradient accumulation. ``.grad`` of the shards changes only then. All ranks must agree.
        ValueError for anything but a bool. No communication.
        """
        flag = _flag("requires_gradient_sync", requires_gradient_sync)
        for unit in _units(self, recurse):
            unit.options.sync_gradients = flag
            unit.options.has_put_off_sync = unit.options.has_put_off_sync or not flag

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether replicas (dim 0 of a 2-D mesh) are reduced in backward, in this unit and (``recurse``) all inside (default True).

        With False gradients are reduce-scattered and kept as shards (memory of one shard) until a backward with True, which
        reduces their sum among replicas once. ``.grad`` changes only then. All ranks must agree. Without effect on a 1-D mesh.
        ValueError for anything but a bool. No communication.
        """
        flag = _flag("requires_all_reduce", requires_all_reduce)
        for unit in _units(self, recurse):
            unit.options.wishes = replace(unit.options.wishes, all_reduce=flag)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of a backward of this model waits until all gradients of shards are there (default True).

        With False reductions go on beside the next forward; a later backward with True, or :func:`hsdp_sync_stream`, waits
        for them. It counts for the whole model, whichever of its sharded modules is told.
        ValueError for anything but a bool. No communication.
        """
        flag = _flag("is_last_backward", is_last_backward)
        context_of(_unit(self)).is_last_backward = flag

    def set_reduce_op_type(self, reduce_op_type: str, *, recurse: bool = True) -> None:
        """``"avg"`` (default): gradients are the mean over all ranks of the mesh; ``"sum"``: their sum.

        For this unit and (``recurse``) all inside of it. ValueError for anything else, and for ``"sum"`` where parameters are
        DTensors that stay as they are: their gradients are those of the loss that was computed. No communication.
        """
        if reduce_op_type not in ("avg", "sum"):
            raise ValueError(f"reduce_op_type must be 'avg' or 'sum', got {reduce_op_type!r}")
        op: Any = "mean" if reduce_op_type == "avg" else "sum"
        units = _units(self, recurse)
        staying = next((unit for unit in units if unit.leaves_dtensors), None)
        if op == "sum" and staying is not None:
            raise ValueError(
                f"reduce_op_type 'sum': parameters of {staying.label} are DTensors that stay as they are, whose gradients are those of "
                "the loss that was computed, over all ranks: scale the loss, or set_gradient_scaling_factor(number of ranks)"
            )
        for unit in units:
            unit.options.wishes = replace(unit.options.wishes, op=op)

    def set_gradient_scaling_factor(self, factor: Any, *, recurse: bool = True) -> None:
        """Multiply every gradient by ``factor`` once, where it is reduced, in this unit and (``recurse``) all inside of it.

        ``factor``: a number, a tensor with one element (read on the device, at each reduction), or None (default) for none.
        ValueError for anything else. No communication.
        """
        platform = get_platform()
        if platform.is_tensor(factor):
            if tuple(factor.shape) not in ((), (1,)):
                raise ValueError(
                    f"factor must be a number, a tensor with one element, or None, got a tensor of shape {tuple(factor.shape)}"
                )
        elif factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
            raise ValueError(f"factor must be a number, a tensor with one element, or None, got {factor!r}")
        for unit in _units(self, recurse):
            unit.options.wishes = replace(unit.options.wishes, factor=factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in this module, also those that wait whole for a synchronisation. After a backward
        that ended with an exception, also free what was being gathered for it.

        ``set_to_none`` False: fill them with zeros. Communication: none of its own; reductions that are under way are waited for,
        which on devices without streams (cpu) includes their all-reduce of replicas.
        """
        platform = get_platform()
        cleared = set()
        for unit in units_in(platform, self):
            if unit.context is not None:
                unit.context.forget_dead_backward()
                with platform.no_grad():
                    unit.context.drain()
            unit.forget_gradients()
            for managed in unit.params:
                _clear(managed.shard, set_to_none)
                cleared.add(id(managed.parameter))
        for _, parameter in platform.named_parameters(self):
            if id(parameter) not in cleared:
                _clear(parameter, set_to_none)

    # --- when whole parameters are freed and gathered
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are freed between forward and backward, in this unit and (``recurse``) all inside of it.

        Said here, it also counts for the root, which otherwise keeps its own. Forward without gradients always frees.
        ValueError for anything but a bool. No communication.
        """
        flag = _flag("reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            unit.options.reshard_as_told = flag

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are freed after backward, in this unit and (``recurse``) all inside of it (default True).

        With False the next forward finds them, unless their shards were written in between (as far as the framework counts
        writes; ``p.data`` goes by unnoticed): between micro-batches. ValueError for anything but a bool. No communication.
        """
        flag = _flag("reshard_after_backward", reshard_after_backward)
        for unit in _units(self, recurse):
            unit.options.reshard_after_backward = flag

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather the parameters of these sharded modules when this one's forward begins. An empty list: of none.

        Without this call, from the second step on it is the one that followed in the step before. Every module costs the memory
        of its whole parameters. ValueError unless a list or tuple of sharded modules. No communication.
        """
        _unit(self).options.forward_prefetch = _units_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """The same for backward: when gradients reach this one's outputs."""
        _unit(self).options.backward_prefetch = _units_of("set_modules_to_backward_prefetch", modules)

    # --- values
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> tuple[list[str], list[str]]:
        """:func:`hp_fsdp.set_model_state_dict` of this module: hooks run, ``_load_from_state_dict`` of inner modules does not. ``assign`` is
        ignored, with a warning: shards stay where they are.
        """
        from hp_fsdp.state import StateDictOptions, set_model_state_dict

        if assign:
            warnings.warn(
                "load_state_dict(assign=True) of a sharded module copies the values into its shards, as without assign",
                stacklevel=2,
            )
        return set_model_state_dict(self, state_dict, options=StateDictOptions(strict=strict))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What torch's ``to_empty``, ``to`` and their kin run on every module: it is the shards that move, and ties stay."""
        unit = _unit(self)
        unit.reshard()
        moved = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for param in unit.params:
            param.tie()
        return moved

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
    # What it calls is the module, whose forward may be compiled.
    unit.platform.run_uncompiled([HSDPModule.__call__], recurse=False)


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"{type(module).__name__} has no unit: fully_shard it first")
    return unit


def _units(module: Any, recurse: bool) -> list[Unit]:
    return (
        list(units_in(get_platform(), module))
        if _flag("recurse", recurse)
        else [_unit(module), *_unit(module).parts]
    )


def _units_of(function: str, modules: Any) -> list[Unit]:
    if not isinstance(modules, (list, tuple)) or not all(isinstance(each, HSDPModule) for each in modules):
        given = [type(each).__name__ for each in modules] if isinstance(modules, (list, tuple)) else modules
        raise ValueError(f"{function} takes a list of modules that fully_shard was called on, got {given!r}")
    return [_unit(each) for each in modules]


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
