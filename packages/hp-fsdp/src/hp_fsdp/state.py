"""Reading and writing the values of a sharded model, whole or as shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hp_dtensor.states.broadcast import Announced, agree, announce, home_of, send
from hp_dtensor.states.options import IncompatibleKeys, checked_options, refuse_names
from hp_dtensor.states.options import StateDictOptions as StateDictOptions
from hp_dtensor.states.values import check_value, is_frozen, parameters_by_name, piece_of, read, write
from hp_fsdp.loading_hooks import given_to_hooks, has_last_word, tell_hooks
from hp_fsdp.unit import units_in
from hp_platform.platform import Platform, get_platform

_REPORTED = "names that hooks have reported"
"""Where they stand among the values that rank 0 announces: no parameter is called so."""


def get_model_state_dict(
    model: Any, *, submodules: Iterable[Any] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Name -> value of all parameters and buffers of ``model``, as it was before sharding; tied ones under all of their names.
    Names are those of before compilation, too.

    Args:
        model: holds units of ``fully_shard`` (or is one), or DTensors of other origin, or nothing sharded at all.
        submodules: modules in ``model`` whose values alone are wanted; default: all.
        options: see :class:`StateDictOptions`.

    Sharded parameters come as DTensors on their mesh and in their placements, which share memory with the shard; with
    ``cpu_offload`` as copies on the cpu. With ``full_state_dict`` they come as whole tensors of their own, on the mesh's
    device; with ``cpu_offload`` as well, on the cpu of the lowest rank of the mesh (rank 0 of the world, where the mesh is the world)
    and nowhere else: other ranks get an empty dict. Dtypes are the original ones. Plain values (buffers, ignored parameters)
    come as they are, as copies where the others are copies. Whole parameters that forward has left for backward are freed.

    Memory beside the result: one whole parameter.
    Communication: none for shards; for whole tensors one all-gather of each parameter's bytes over the mesh dims that cut it,
    by all ranks, one parameter after the other; tied ones once.
    ValueError for options or submodules that are none, and if two names without prefix are the same.
    """
    options = checked_options(options)
    platform = get_platform()
    show_shards(platform, model)
    parameters = parameters_by_name(platform, model)
    values = {platform.unwrapped_name(name): value for name, value in platform.state_dict(model).items()}
    names = _chosen(platform, model, values, parameters, submodules, options)
    keeps = True
    if options.full_state_dict and options.cpu_offload:
        keeps = home_of(platform, values.values()).is_source
    made: dict[Any, Any] = {}
    found: dict[str, Any] = {}
    for name, shown_as in names.items():
        key = id(parameters[name]) if name in parameters else name
        if key not in made:
            made[key] = read(platform, values[name], options, keeps=keeps)
        if keeps:
            found[shown_as] = made[key]
    return found


def set_model_state_dict(
    model: Any, state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Write the values into the shards and buffers of ``model``, in place; return the missing and the unexpected names.

    Args:
        model: as in :func:`get_model_state_dict`.
        state_dict: name -> value. A value is a DTensor of the parameter's global shape in any placements, a whole tensor (the
            piece is cut from it; it lies on any device and is cast), or a tensor of the piece's shape where that is another
            than the whole one's. A tied parameter needs one of its names only; of several the last counts.
        options: with ``broadcast_from_rank0`` only the lowest rank of the mesh (rank 0) gives whole values, the others ``{}``.

    RuntimeError with both lists for missing or unexpected names if ``options.strict``, and for parameters on the meta device;
    ValueError for a value of another shape. All of this is found before anything is written, and with
    ``broadcast_from_rank0`` on all ranks, if one finds it; why rank 0 cannot give values is said on all.

    Hooks that were registered on modules with the framework's ``register_load_state_dict_pre_hook`` run before names are compared (with
    ``broadcast_from_rank0`` on rank 0 alone) and may report names, those of ``register_load_state_dict_post_hook`` when everything is
    written: they may strike names off the lists, so where there is one, names that are left are an error after that. Values go straight
    into the shards, so a class's own ``_load_from_state_dict`` is not called: what it does with names and values belongs into such a hook.

    Memory: the piece that is written; with ``broadcast_from_rank0`` one whole parameter on every rank.
    Communication: none for whole tensors and pieces; for DTensors in other placements what their redistribution needs. With
    ``broadcast_from_rank0`` one broadcast of each value's bytes, and before it two of about 100 bytes a name, and an
    all-gather of 8 bytes.
    """
    options = checked_options(options)
    platform = get_platform()
    show_shards(platform, model)
    values = platform.state_dict(model)
    paths = {platform.unwrapped_name(path): path for path in values}
    targets: dict[str, Any] = {name: values[path] for name, path in paths.items()}
    parameters = parameters_by_name(platform, model)
    # The parameters themselves, not what detaching made of them: the former is what writing is promised for.
    targets.update({name: parameter for name, parameter in parameters.items() if name in targets})

    home = home_of(platform, targets.values()) if options.broadcast_from_rank0 else None
    problem: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"a state dict is a mapping from names to tensors, got {type(state_dict).__name__}"
            )
        if home is None or home.is_source:
            reported = IncompatibleKeys([], [])
            mine = given_to_hooks(platform, model, state_dict, reported)
            mine[_REPORTED] = tuple(reported)
    except Exception as error:
        if home is None:
            raise
        problem = error
    given = dict(mine) if home is None else announce(platform, mine, home, problem)
    names = _compared(targets, parameters, given, options, IncompatibleKeys(*given.pop(_REPORTED, ([], []))))
    try:
        if problem is not None:
            raise problem
        if options.strict and not has_last_word(platform, model):
            refuse_names(type(model).__name__, names, "rename them")
        for name, value in given.items():
            if name in targets and platform.is_tensor(targets[name]):
                check_value(platform, name, value, targets[name])
    except (ValueError, RuntimeError) as error:
        if home is None:
            raise
        problem = error  # told to the others first, who would wait for this rank
    if home is not None:
        agree(problem, home, "set_model_state_dict")

    def receive(found: list[str], value: Any) -> None:
        for name in found:
            if name in targets:
                write(platform, targets[name], piece_of(platform, value, targets[name]))

    for name, value in given.items():
        if name in targets and not platform.is_tensor(targets[name]):
            _set_extra_state(platform, model, paths[name], value)
        elif not isinstance(value, Announced):
            receive([name], value)
    if home is not None:
        send(platform, given, mine, home, receive)
    tell_hooks(platform, model, names)
    if options.strict:
        refuse_names(type(model).__name__, names, "rename them")
    return names


def show_shards(platform: Platform, model: Any) -> None:
    """Free whole parameters that are there, so that the modules show shards. No communication."""
    for unit in units_in(platform, model):
        unit.reshard()


def _chosen(
    platform: Platform,
    model: Any,
    values: Mapping[str, Any],
    parameters: Mapping[str, Any],
    submodules: Iterable[Any] | None,
    options: StateDictOptions,
) -> dict[str, str]:
    """The names to read, and what they are called in the result."""
    names = [name for name in values if not (options.ignore_frozen_params and is_frozen(parameters, name))]
    if submodules is None:
        return {name: name for name in names}
    paths = {id(module): platform.unwrapped_name(path) for path, module in platform.named_modules(model)}
    prefixes = []
    for index, module in enumerate(submodules):
        if id(module) not in paths:
            raise ValueError(
                f"submodules[{index}], {type(module).__name__}, is no module in {type(model).__name__}: give modules of the model"
            )
        path = paths[id(module)]
        prefixes.append(f"{path}." if path else "")
    found: dict[str, str] = {}
    for name in names:
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        if prefix is not None:
            found[name] = name if options.keep_submodule_prefixes else name[len(prefix) :]
    if len(set(found.values())) < len(found):
        raise ValueError(
            "keep_submodule_prefixes=False with several submodules gives two values one name: give one submodule, or keep "
            "the prefixes"
        )
    return found


def _compared(
    targets: Mapping[str, Any],
    parameters: Mapping[str, Any],
    given: Mapping[str, Any],
    options: StateDictOptions,
    reported: IncompatibleKeys,
) -> IncompatibleKeys:
    """The names that do not match, and those that hooks have reported."""
    reached = {id(parameters[name]) for name in given if name in parameters}
    missing = [
        name
        for name in targets
        if name not in given
        and not (name in parameters and id(parameters[name]) in reached)
        and not (options.ignore_frozen_params and is_frozen(parameters, name))
    ]
    unexpected = [name for name in given if name not in targets]
    return IncompatibleKeys(
        list(dict.fromkeys([*missing, *reported.missing_keys])),
        list(dict.fromkeys([*unexpected, *reported.unexpected_keys])),
    )


def _set_extra_state(platform: Platform, model: Any, name: str, value: Any) -> None:
    """What a module adds to a state dict by itself, and is no tensor, goes back to it as it is."""
    platform.get_submodule(model, name.rpartition(".")[0]).set_extra_state(value)
