"""Reading and writing the values of a sharded model, whole or as shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.gather import gather_columns
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.unit import Unit, units_in
from hp_platform.platform import Platform, get_platform
from hp_platform.process_groups import get_rank
from hp_platform.protocols.tensor import Tensor


@dataclass(frozen=True)
class StateDictOptions:
    """How state dicts are made and read. Field names are those of torch.distributed.checkpoint.state_dict."""

    full_state_dict: bool = False
    """Whole tensors instead of DTensors."""
    cpu_offload: bool = False
    """Values on the cpu. Together with ``full_state_dict`` only rank 0 gets them, other ranks an empty dict."""
    strict: bool = True
    """When loading: missing and unexpected names are an error."""


def get_model_state_dict(model: Any, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Name -> value of all parameters and buffers of ``model``, as it was before sharding; tied ones under all of their names.

    Sharded parameters come as DTensors on their mesh, ``Shard(0)`` (2-D mesh: ``Replicate, Shard(0)``; scalars: ``Replicate``)
    that share memory with the shard; or, with ``full_state_dict``, as whole tensors of their own. Dtypes are the original
    ones. Others come detached, as they are. Whole parameters that are there (between forward and backward) are freed.

    Communication: none for shards; for whole tensors one all-gather per unit and dtype, by all ranks.
    """
    options = _options(options)
    platform = get_platform()
    units = list(units_in(platform, model))
    for unit in units:
        unit.reshard()
    # Nobody keeps what rank 0 alone is asked for; the gathers are everybody's.
    wanted = not (options.full_state_dict and options.cpu_offload) or get_rank() == 0
    whole: dict[int, Tensor] = {}
    if options.full_state_dict:
        for unit in units:
            for param, value in _whole_values(platform, unit):
                if wanted:
                    whole[id(param)] = platform.to_device(value, "cpu") if options.cpu_offload else value
    if not wanted:
        return {}

    managed = dict(_managed_by_name(platform, model, units))
    found: dict[str, Any] = {}
    for name, value in platform.state_dict(model).items():
        if name in managed and options.full_state_dict:
            found[name] = whole[id(managed[name][1])]
            continue
        value = platform.to_device(value, "cpu") if options.cpu_offload else value
        found[name] = value
    return found


def set_model_state_dict(
    model: Any, state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> tuple[list[str], list[str]]:
    """Write the values into the shards and buffers of ``model``, in place; return the missing and the unexpected names.

    A value is a DTensor with the parameter's global shape, a whole tensor (the shard is cut from it; it lies on any device
    and is cast), or a tensor of the shard's shape where that is another than the whole one's.

    RuntimeError with both lists for missing or unexpected names if ``options.strict``, ValueError for a value of another
    shape; nothing has been written then. Communication: none (DTensors in another layout: what their redistribution needs).
    """
    options = _options(options)
    platform = get_platform()
    units = list(units_in(platform, model))
    for unit in units:
        unit.reshard()
    targets = dict(platform.state_dict(model))
    missing = [name for name in targets if name not in state_dict]
    unexpected = [name for name in state_dict if name not in targets]
    if options.strict and (missing or unexpected):
        raise RuntimeError(
            f"the state dict does not fit {type(model).__name__}: missing {', '.join(missing) or 'nothing'}; unexpected "
            f"{', '.join(unexpected) or 'nothing'}; rename them, or pass StateDictOptions(strict=False)"
        )
    managed = dict(_managed_by_name(platform, model, units))
    writes = []
    for name, value in state_dict.items():
        if name in managed:
            unit, param = managed[name]
            writes.append((param.shard, _local_value(platform, name, value, unit, param)))
        elif name in targets:
            if tuple(value.shape) != tuple(targets[name].shape):
                raise ValueError(
                    f"{name!r} has shape {tuple(targets[name].shape)}, the given value {tuple(value.shape)}"
                )
            writes.append((targets[name], value))
    for target, value in writes:
        platform.copy_(target, platform.to_device(platform.detach(value), platform.device_of(target)))
    return missing, unexpected


def _options(options: Any) -> StateDictOptions:
    if options is None:
        return StateDictOptions()
    if not isinstance(options, StateDictOptions):
        raise ValueError(f"options must be a hp_fsdp.StateDictOptions, got {type(options).__name__}")
    return options


def _managed_by_name(
    platform: Platform, model: Any, units: list[Unit]
) -> Iterator[tuple[str, tuple[Unit, ManagedParameter]]]:
    """The sharded parameters under all of their names in ``model``."""
    known = {id(param.parameter): (unit, param) for unit in units for param in unit.params}
    for name, parameter in platform.named_parameters(model, remove_duplicate=False):
        if id(parameter) in known:
            yield name, known[id(parameter)]


def _whole_values(platform: Platform, unit: Unit) -> Iterator[tuple[ManagedParameter, Tensor]]:
    """Copies of the unit's whole parameters in their original dtypes, one after the other."""
    with platform.no_grad():
        for param, columns in gather_columns(platform, unit.buffers, unit.places, lambda original: original):
            assert param.slot is not None
            padded = platform.reshape(columns, param.slot.padded_shape)
            yield param, platform.clone(platform.narrow(padded, 0, 0, param.shape[0]))
        for param in unit.params:
            if param.slot is None:
                yield param, platform.clone(platform.detach(param.shard))


def _local_value(platform: Platform, name: str, value: Any, unit: Unit, param: ManagedParameter) -> Tensor:
    """The part of ``value`` that this rank's shard takes."""
    given, rank = tuple(value.shape), unit.places.shard_rank
    local_shape = param.local_shape(rank)
    if isinstance(value, DTensor):
        if given == param.shape:
            return value.redistribute(unit.places.mesh, param.parameter.placements).to_local()
    elif given == param.shape:
        if param.slot is None:
            return value
        return platform.narrow(value, 0, param.slot.local_start(rank), local_shape[0])
    elif given == local_shape:
        return value
    raise ValueError(
        f"{name!r} has shape {param.shape}, its shard on rank {rank} of {unit.places.num_shards} {local_shape}; the given "
        f"value has {given}, which is neither"
    )
