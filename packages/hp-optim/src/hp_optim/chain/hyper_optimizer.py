"""``get_hyper_optimizer``: Muon for the matrices of a model and AdamW for the rest, as one optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hp_optim.chain.chained_optimizer import ChainedOptimizer
from hp_optim.chain.routing import (
    ADAMW,
    KINDS,
    MUON,
    Route,
    Routing,
    names_of,
    placements_of,
    route_parameters,
)
from hp_optim.checks import NAMES, PARAMS, names_here
from hp_optim.groups import Group, groups_of
from hp_platform.platform import Platform, get_platform
from hp_platform.process_groups import get_rank, is_initialized

_logger = logging.getLogger("hp_optim.routing")


def get_hyper_optimizer(
    model: Any,
    muon_params: Iterable[Any] | None = None,
    adamw_params: Iterable[Any] | None = None,
    muon_kwargs: Mapping[str, Any] | None = None,
    adamw_kwargs: Mapping[str, Any] | None = None,
    *,
    patterns: Mapping[str, str] | None = None,
) -> ChainedOptimizer:
    """A chain of AdamW and Muon, in this order, over all trainable parameters of a model.

    Args:
        model: made before, and sharded if it will be.
        muon_params: groups (dicts with ``"params"`` and hyperparameters), parameters or (name, parameter) pairs for Muon. An empty
            list: no Muon. None: what :func:`hp_optim.route_parameters` gives it of the parameters that ``adamw_params`` leaves.
        adamw_params: the same for AdamW; None with given ``muon_params``: all trainable parameters that those leave.
        muon_kwargs: arguments of ``hp_optim.Muon``; names may begin with ``muon_``, which is removed.
        adamw_kwargs: arguments of ``hp_optim.AdamW``; names may begin with ``adamw_``.
        patterns: see :func:`hp_optim.route_parameters`; for what is chosen here.

    Parameters keep their names in the groups (``"param_names"``), also those of given groups, so that Muon's ``split`` may say by
    names which matrices they hold.

    The chain's ``routing`` says which parameter went where and why; ``print(chain.routing)`` gives the table, which rank 0 also logs
    (logger ``hp_optim.routing``, level INFO). With two empty lists the chain is empty. Its state dicts have flat keys if it has
    both optimizers, else nested ones.

    Communication: none. ValueError for ``patterns`` beside two lists, for arguments that the optimizers do not have, for a
    parameter that is in both lists, for a trainable one that is in none (all are named), and for one that is not in the model.
    """
    platform = get_platform()
    given = {
        MUON: _groups(platform, "muon_params", muon_params),
        ADAMW: _groups(platform, "adamw_params", adamw_params),
    }
    if patterns is not None and None not in given.values():
        raise ValueError(
            "patterns say what is chosen by the rule, and with muon_params and adamw_params nothing is: leave patterns out, or one of "
            "the lists"
        )
    classes = _classes()
    kwargs = {
        MUON: _without_prefix(MUON, "muon_kwargs", muon_kwargs, classes[MUON]),
        ADAMW: _without_prefix(ADAMW, "adamw_kwargs", adamw_kwargs, classes[ADAMW]),
    }
    routing = _routing(platform, model, given, patterns)
    groups = {kind: _chosen_groups(platform, model, kind, given[kind], routing) for kind in KINDS}
    optimizers = {kind: classes[kind](groups[kind], **kwargs[kind]) for kind in KINDS if groups[kind]}
    chain = ChainedOptimizer(model, optimizers, flatten=len(optimizers) == len(KINDS))
    chain.routing = routing
    if not is_initialized() or get_rank() == 0:
        _logger.info("parameters and their optimizers:\n%s", routing)
    return chain


def _classes() -> dict[str, Callable[..., Any]]:
    import hp_optim

    return {MUON: hp_optim.Muon, ADAMW: hp_optim.AdamW}


def _groups(platform: Platform, argument: str, params: Iterable[Any] | None) -> list[Group] | None:
    """The caller's groups, with lists of parameters; an empty list where there is no parameter, None where nothing is given."""
    if params is None:
        return None
    if not isinstance(params, Mapping) and not platform.is_tensor(params) and not isinstance(params, str):
        params = list(params)
        if not params:
            return []
    return [group for group in groups_of(platform, argument, params) if group[PARAMS]]


def _without_prefix(
    kind: str, argument: str, kwargs: Mapping[str, Any] | None, optimizer: Any
) -> dict[str, Any]:
    """Arguments of the constructor. ValueError that lists all that it does not have, as they were given."""
    found: dict[str, Any] = {}
    unknown = []
    for key, value in (kwargs or {}).items():
        name = key.removeprefix(f"{kind}_")
        if name in found:
            raise ValueError(f"{argument} has {name!r} with and without the prefix {kind}_: give it once")
        found[name] = value
        if name not in optimizer.HYPERPARAMETERS:
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"{argument} has {', '.join(map(repr, unknown))}, which {optimizer.__name__} does not take; it takes "
            f"{', '.join(sorted(optimizer.HYPERPARAMETERS))}: remove or rename them"
            f"{names_here([key.removeprefix(f'{kind}_') for key in unknown], optimizer.HYPERPARAMETERS)}"
        )
    return found


def _routing(
    platform: Platform,
    model: Any,
    given: Mapping[str, list[Group] | None],
    patterns: Mapping[str, str] | None,
) -> Routing:
    """Where every parameter of the model goes; checked."""
    ruled = route_parameters(model, patterns)
    listed: dict[int, list[str]] = {}
    for kind in KINDS:
        for parameter in (p for group in given[kind] or () for p in group[PARAMS]):
            listed.setdefault(id(parameter), []).append(kind)
    names = names_of(platform, model)
    _check_known(given, names)
    twice = [names[key][1][0] for key, kinds in listed.items() if len(kinds) > 1]
    if twice:
        raise ValueError(
            f"{_shown(twice)} in muon_params and in adamw_params, and would be updated twice in a step: leave each in one of them"
        )
    if given[MUON] == [] and given[ADAMW] == []:
        return Routing(tuple(Route(r.name, r.shape, r.placements, "", "both lists are empty") for r in ruled))
    routes = []
    left = []
    for rule, (parameter, its_names) in zip(ruled, names.values(), strict=True):
        if id(parameter) in listed:
            kind = listed[id(parameter)][0]
            routes.append(Route(its_names[0], rule.shape, placements_of(parameter), kind, f"{kind}_params"))
            continue
        kind = rule.optimizer if given[MUON] is None else ADAMW
        if rule.optimizer and given[kind] is not None:
            left.append(its_names[0])
        why = rule.why if not rule.optimizer or given[MUON] is None else "not in muon_params"
        routes.append(Route(its_names[0], rule.shape, rule.placements, kind if rule.optimizer else "", why))
    if left:
        raise ValueError(
            f"{_shown(left)} in neither of muon_params and adamw_params, and would stay untrained: add to one of them, let one of the "
            "lists be None, or freeze what shall not be trained (requires_grad=False)"
        )
    return Routing(tuple(routes))


def _check_known(given: Mapping[str, list[Group] | None], names: Mapping[int, tuple[Any, list[str]]]) -> None:
    for kind in KINDS:
        for number, group in enumerate(given[kind] or ()):
            for place, parameter in enumerate(group[PARAMS]):
                if id(parameter) not in names:
                    raise ValueError(
                        f"{kind}_params: parameter {place} of group {number}, of shape {tuple(parameter.shape)}, is no parameter of the "
                        "model: make the groups after fully_shard and parallelize_module, from model.named_parameters()"
                    )


def _shown(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _chosen_groups(
    platform: Platform, model: Any, kind: str, given: list[Group] | None, routing: Routing
) -> list[Any]:
    """Groups of (name, parameter) pairs; empty if there are no parameters."""
    pairs = [(names[0], parameter) for parameter, names in names_of(platform, model).values()]
    if given is None:
        chosen = set(routing.names(kind))
        return [(name, parameter) for name, parameter in pairs if name in chosen]
    known = {id(parameter): name for name, parameter in pairs}
    groups = []
    for group in given:
        names = group.get(NAMES, [known[id(parameter)] for parameter in group[PARAMS]])
        rest = {key: value for key, value in group.items() if key != NAMES}
        groups.append({**rest, PARAMS: list(zip(names, group[PARAMS], strict=True))})
    return groups
