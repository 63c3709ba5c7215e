"""``full_params``: for a while the model has whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hp_dtensor import DTensor
from hp_dtensor.module_tensors import Place, parameter_places, tied_places
from hp_dtensor.states.values import check_value, piece_of, whole_of, write
from hp_fsdp.state import show_shards
from hp_fsdp.unit import units_in
from hp_platform.platform import Platform, get_platform

MARK = "_hp_fsdp_whole_parameters"
"""Attribute of a model that :func:`full_params` is open for."""


@contextmanager
def full_params(model: Any, *, writeback: bool = False) -> Iterator[None]:
    """A block in which the parameters of ``model``, of all units in it, are whole and plain: for averages of weights, for export.

    In the block every sharded parameter's place holds a parameter with all values, in the original dtype, on the device of
    the shard; ties stay ties. Gradients are not there. At its end the shards are in their places again, the very objects
    that an optimizer knows.

    Args:
        model: sharded, or with sharded modules in it.
        writeback: whether the values that stand there at the end of the block go into the shards: every rank cuts its own
            piece, so all ranks must have written the same. Nothing is written back if the block is left by an exception.
            False: what was written is forgotten.

    The block is no place for forward, which gathers by itself: RuntimeError; also if the block is open already. Not between a
    forward and its backward with ``writeback``: that would compute with other values than forward did. ValueError if
    ``writeback`` is no bool, or a parameter has got another shape at the end of the block.

    Memory: all whole parameters of the model, beside the shards. For one at a time use
    :func:`hp_fsdp.get_model_state_dict` with ``full_state_dict`` and ``cpu_offload``.
    Communication: one all-gather of each parameter's bytes over the mesh dims that cut it, by all ranks, on entry; none at the end.
    """
    if not isinstance(writeback, bool):
        raise ValueError(f"writeback must be True or False, got {writeback!r}")
    platform = get_platform()
    if not platform.is_module(model):
        raise ValueError(
            f"full_params takes a module of {platform.platform_type.value}, got {type(model).__name__}"
        )
    show_shards(platform, model)
    modules = [module for _, module in platform.named_modules(model)]
    if any(getattr(module, MARK, False) for module in modules):
        raise RuntimeError(
            f"full_params is open already for {type(model).__name__} or a module in it: leave that block before"
        )
    groups = [group for group in tied_places(parameter_places(model)) if isinstance(group[0].tensor, DTensor)]
    sharded = [module for unit in units_in(platform, model) for module in unit.modules]
    hooked = [model, *(module for module in sharded if module is not model)]
    # Before all others, so that no unit begins to gather.
    handles = [platform.register_forward_pre_hook(module, _refuse, prepend=True) for module in hooked]
    for module in hooked:
        setattr(module, MARK, True)
    try:
        for group in groups:
            _show(platform, group, _whole(platform, group[0].tensor))
        yield
        if writeback:
            _write_back(platform, groups)
    finally:
        for group in groups:
            _show(platform, group, group[0].tensor)
        for module in hooked:
            setattr(module, MARK, False)
        for handle in handles:
            handle.remove()


def _whole(platform: Platform, shard: Any) -> Any:
    whole = platform.to_device(whole_of(platform, shard), platform.device_of(shard.to_local()))
    return platform.parameter(whole, requires_grad=bool(shard.requires_grad))


def _show(platform: Platform, group: list[Place], parameter: Any) -> None:
    for place in group:
        platform.set_parameter(place.owner, place.attribute, parameter)


def _write_back(platform: Platform, groups: list[list[Place]]) -> None:
    found = []
    for group in groups:
        first = group[0]
        # What stands there now: the block may have put another tensor there.
        value = getattr(first.owner, first.attribute)
        if tuple(value.shape) != tuple(first.tensor.shape):
            raise ValueError(
                f"{first.name!r} has shape {tuple(value.shape)} at the end of full_params, and had {tuple(first.tensor.shape)}: "
                "only values can be written back"
            )
        check_value(platform, first.name, value, first.tensor)
        found.append((first.tensor, value))
    for shard, value in found:
        write(platform, shard, piece_of(platform, value, shard))


def _refuse(module: Any, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        f"forward of {type(module).__name__} inside of full_params: units gather by themselves; leave the block before, or "
        "load get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) into an unsharded model"
    )
