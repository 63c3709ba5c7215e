"""What a chain of optimizers refuses, and what it says to change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_optim.chain.chained_optimizer import ChainedOptimizer
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from chain_models import make_model, momentum, parameters, train, two


def wrong_calls(world: World) -> dict[str, tuple[Any, type[Exception], str]]:
    model = make_model(world)
    named = parameters(world, model)
    weight, scale = named["norm.weight"], named["scale"]
    chain = ChainedOptimizer(model, two(world, model))
    train(world, chain, 0)
    empty = ChainedOptimizer(model, {})
    late = ChainedOptimizer(model, {"a": momentum([weight]), "b": momentum([scale])})
    late.optimizers_dict["b"].add_param_group({"params": [weight]})
    state = chain.state_dict()
    stranger = world.platform.parameter(world.platform.zeros((2, 3), "float32", world.device))

    def groups(value: Any) -> Any:
        return lambda: setattr(chain, "param_groups", value)

    def loading(value: Any) -> Any:
        return lambda: chain.load_state_dict(value)

    short = {"state": {}, "param_groups": state["param_groups"][:1]}
    more = {**state, "state": {"other": {"velocity": 1.0}}}
    shape = {
        **state,
        "state": {"norm.weight": {"velocity": world.platform.zeros((9,), "float32", world.device)}},
    }
    return {
        "no model": (
            lambda: ChainedOptimizer([weight], {}),
            TypeError,
            "model is a list; it is the module whose parameters",
        ),
        "a list": (
            lambda: ChainedOptimizer(model, [momentum([weight])]),
            TypeError,
            "optimizers is a list; it is a dict from names to optimizers, .*: give every optimizer a name",
        ),
        "flatten of another type": (
            lambda: ChainedOptimizer(model, {}, flatten=1),
            TypeError,
            "flatten is True or False, got 1",
        ),
        "a number for a name": (
            lambda: ChainedOptimizer(model, {1: momentum([weight])}),
            TypeError,
            "the names of optimizers are strings, got 1",
        ),
        "a number for an optimizer": (
            lambda: ChainedOptimizer(model, {"a": 3}),
            TypeError,
            r"optimizers\['a'\] is a int, which has no param_groups, state, step, zero_grad: give an optimizer",
        ),
        "in two": (
            lambda: ChainedOptimizer(model, {"a": momentum([weight]), "b": momentum([weight])}),
            KeyError,
            "norm.weight is in two optimizers of the chain, a and b: leave it in one of them",
        ),
        "in two since": (late.state_dict, KeyError, "norm.weight is in two optimizers of the chain, a and b"),
        "of another model": (
            lambda: ChainedOptimizer(model, {"a": momentum([stranger])}),
            ValueError,
            r"of the optimizer, of shape \(2, 3\), is no parameter of Part: make optimizers after fully_shard",
        ),
        "groups as a tuple": (
            groups(()),
            TypeError,
            "param_groups of a chain is a list of dicts, got a tuple",
        ),
        "too few groups": (
            groups([{}]),
            ValueError,
            r"has 1 groups; the optimizers of the chain have 2 \(rest 1, matrices 1\): give as many, in this order",
        ),
        "the one of two": (
            lambda: chain.optimizer,
            ValueError,
            r"has .optimizer if it has exactly one, this one has 2 \(rest, matrices\): take one from optimizers_dict",
        ),
        "the one of none": (lambda: empty.optimizer, ValueError, r"this one has 0 \(none\)"),
        "a group for two": (
            lambda: chain.add_param_group({"params": [scale]}),
            ValueError,
            r"a chain of 2 optimizers does not know which one .* call add_param_group of one of optimizers_dict \(rest",
        ),
        "state of a stranger": (
            lambda: chain.state.update({stranger: {}}),
            KeyError,
            r"no optimizer of the chain has this parameter, of shape \(2, 3\)",
        ),
        "no dict": (loading([]), ValueError, "the state dict of a chain is a dict, got a list"),
        "numbered": (
            loading({"state": {}, "param_groups": [{"params": [0]}]}),
            ValueError,
            "has the parameter 0; parameters stand by their names here",
        ),
        "another flat form": (
            loading({"velocity": 1}),
            ValueError,
            "has the key 'velocity'; flat keys are 'state.<parameter>.<key>'",
        ),
        "missing": (
            loading(short),
            RuntimeError,
            "does not fit the optimizer of Part: missing .*; unexpected nothing",
        ),
        "unexpected": (loading(more), RuntimeError, "missing nothing; unexpected other"),
        "another shape": (
            loading(shape),
            ValueError,
            r"'norm\.weight/velocity' has shape \(4,\), the given value \(9,\): give it in this shape",
        ),
    }


@distributed(world_size=1)
def test_wrong_calls_are_refused_and_say_what_to_change(world: World) -> None:
    for call, error, message in wrong_calls(world).values():
        with pytest.raises(error, match=message):
            call()
