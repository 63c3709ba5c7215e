"""State of optimizers by the names of parameters, whole or as shards, for any number of ranks.

An optimizer is any object with ``param_groups`` (dicts with ``"params"`` and hyperparameters) and ``state`` (parameter ->
dict), as torch.optim's are. Nothing else of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.states.optimizer_names import NamedOptimizer
from hp_dtensor.states.optimizer_state import load_optimizer, read_optimizer
from hp_dtensor.states.options import IncompatibleKeys, StateDictOptions, checked_options
from hp_dtensor.states.values import parameters_by_name
from hp_fsdp.state import show_shards
from hp_platform.platform import Platform, get_platform


def get_optimizer_state_dict(
    model: Any, optimizer: Any, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}``. Reading changes nothing.

    Args:
        model: whose parameters' names are used; a tied parameter has the first of its names.
        optimizer: made after ``fully_shard``; or a list of optimizers, whose groups follow each other.
        options: see :class:`StateDictOptions`.

    What lies as its parameter comes as a DTensor in the same placements that shares memory with the optimizer's; with
    ``full_state_dict`` as a whole tensor of its own. Other tensors, such as counts of steps, and numbers come as they are;
    hyperparameters that are functions are left out, and dtypes come by their names. A parameter that has no state, because it
    never had a gradient, has no entry. With ``full_state_dict`` and ``cpu_offload`` only the lowest rank of the mesh (rank 0)
    gets anything; other ranks get an empty dict.

    ``hp_dtensor.save`` keeps the result, and :func:`set_optimizer_state_dict` takes it at any number of ranks.

    Memory beside the result: one whole tensor.
    Communication: none for shards; for whole tensors one all-gather of each one's bytes over the mesh dims that cut it.
    ValueError for an optimizer that is none, with a parameter that is not in the model, or with lists of tensors in its state
    (LBFGS); NotImplementedError where the framework's optimizers keep no state by parameter.
    """
    options = checked_options(options)
    platform = get_platform()
    return read_optimizer(platform, _named(platform, model, optimizer), options)


def set_optimizer_state_dict(
    model: Any, optimizer: Any, state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Give an optimizer the state and the hyperparameters of a dict; return missing and unexpected names of parameters.

    Args:
        model: whose parameters' names are used; any name of a tied parameter does.
        optimizer: made after ``fully_shard``; fresh or used; or a list of optimizers.
        state_dict: as :func:`get_optimizer_state_dict` makes it, at any number of ranks; values are DTensors in any
            placements, whole tensors on any device, or tensors of the piece's shape.
        options: with ``broadcast_from_rank0`` only the lowest rank of the mesh (rank 0) gives whole values, others ``{}``.

    Tensors that the optimizer has are written in place, and cast. Those that it lacks are made from the dict, in the dict's
    dtype: of the parameter's shape in its placements, of other shapes replicated, single numbers as plain tensors. A
    parameter without an entry in the dict has no state afterwards. Groups are matched by their parameters' names, not by
    their order; hyperparameters are taken from the dict, but for those that say how the optimizer runs (``foreach``,
    ``fused``, ``capturable``, ``differentiable``, ``offload_state``), and those that are functions in this optimizer, which stay.

    RuntimeError with both lists for missing or unexpected names if ``options.strict``; ValueError for a tensor of another
    shape, and for a group whose parameters stand in several groups of the dict. All of this is found before anything is
    written, and with ``broadcast_from_rank0`` on all ranks, if one finds it.

    Memory: the piece that is written; with ``broadcast_from_rank0`` one whole tensor on every rank.
    Communication: as :func:`hp_fsdp.set_model_state_dict`.
    """
    options = checked_options(options)
    platform = get_platform()
    named = _named(platform, model, optimizer)
    return load_optimizer(platform, named, state_dict, options, what="set_optimizer_state_dict")


def _named(platform: Platform, model: Any, optimizer: Any) -> NamedOptimizer:
    show_shards(platform, model)
    return NamedOptimizer(platform, parameters_by_name(platform, model), type(model).__name__, optimizer)
