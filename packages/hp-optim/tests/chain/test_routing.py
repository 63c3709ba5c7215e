"""Which parameter goes to which optimizer, and the table that says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_optim.chain.routing import route_parameters, show_routing
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from chain_models import dtype_of, make_model, parameters, shard


def module(world: World, **parts: Any) -> Any:
    """A module with these sub-modules, and parameters of these shapes."""
    platform = world.platform

    class Part(platform.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                whole = isinstance(part, tuple)
                value = platform.zeros(part, dtype_of(world), world.device) if whole else part
                setattr(self, name, platform.parameter(value) if whole else part)

    return Part()


@distributed(world_size=(1, 2))
def test_matrices_go_to_muon_and_all_others_to_adamw(world: World) -> None:
    model = make_model(world)
    expected = [
        ("embed_tokens.weight", "adamw", "embedding"),
        ("layers.0.experts", "muon", "3 matrices"),
        ("layers.0.norm.weight", "adamw", "vector"),
        ("layers.0.output.weight", "muon", "matrix"),
        ("layers.0.up.bias", "adamw", "vector"),
        ("layers.0.up.weight", "muon", "matrix"),
        ("lm_head.weight", "adamw", "head"),
        ("norm.weight", "adamw", "vector"),
        ("scale", "adamw", "scalar"),
    ]
    for each in (model, shard(world, make_model(world))):
        with count_collectives() as counted:
            routing = route_parameters(each)
        counted.assert_counts()
        routes = {route.name: route for route in routing}
        assert [route.name for route in routing] == list(parameters(world, each))
        assert len(routing) == len(routes) == 14
        for name, optimizer, why in expected:
            assert (routes[name].optimizer, routes[name].why) == (optimizer, why)
        assert routes["layers.0.experts"].shape == (3, 6, 4)
        assert sorted([*routing.names("muon"), *routing.names("adamw")]) == sorted(routes)
    assert routes["layers.0.experts"].placements == "dp: Shard(0)"
    assert routes["norm.weight"].placements == "dp: Replicate()"


@distributed(world_size=1)
def test_the_table_has_one_row_for_all_layers_that_are_alike(world: World) -> None:
    assert sorted(
        show_routing(make_model(world), {"layers.1.up.weight": "adamw"}).splitlines()[2:]
    ) == sorted(
        """\
embed_tokens.weight     1       7x4     whole       adamw      embedding
layers.*.norm.weight    2       4       whole       adamw      vector
layers.*.up.bias        2       6       whole       adamw      vector
layers.*.experts        2       3x6x4   whole       muon       3 matrices
layers.*.output.weight  2       4x6     whole       muon       matrix
layers.0.up.weight      1       6x4     whole       muon       matrix
layers.1.up.weight      1       6x4     whole       adamw      pattern layers.1.up.weight
norm.weight             1       4       whole       adamw      vector
lm_head.weight          1       7x4     whole       adamw      head
scale                   1       scalar  whole       adamw      scalar""".splitlines()
    )
    assert show_routing(make_model(world)).splitlines()[0].split() == [
        "parameter",
        "number",
        "shape",
        "placements",
        "optimizer",
        "why",
    ]


@distributed(world_size=1)
def test_names_and_shapes_decide_as_the_rule_says(world: World) -> None:
    block = module(world, embedding_norm=(3,), output=module(world, weight=(3, 4)), score=(2, 2))
    model = module(
        world,
        pos_embed=(1, 5, 4),
        cls_token=(1, 1, 4),
        patch_embed=module(world, proj=module(world, weight=(4, 3, 2, 2))),
        wte=module(world, weight=(5, 4)),
        embedding_model=module(world, layers=world.platform.ModuleList([block])),
        conv=module(world, weight=(4, 3, 2, 2)),
        flat=(1, 7),
        classifier=module(world, weight=(2, 4)),
        frozen=(3, 3),
        router=(3, 4),
    )
    model.frozen.requires_grad = False
    found = {r.name: (r.optimizer, r.why) for r in route_parameters(model)}
    assert found == {
        "pos_embed": ("adamw", "embedding"),
        "cls_token": ("adamw", "one dim only is larger than 1"),
        "patch_embed.proj.weight": ("adamw", "embedding"),
        "wte.weight": ("adamw", "embedding"),
        "embedding_model.layers.0.embedding_norm": ("adamw", "vector"),
        "embedding_model.layers.0.output.weight": ("muon", "matrix"),
        "embedding_model.layers.0.score": ("muon", "matrix"),
        "conv.weight": ("muon", "kernel"),
        "flat": ("adamw", "one dim only is larger than 1"),
        "classifier.weight": ("adamw", "head"),
        "frozen": ("", "frozen"),
        "router": ("muon", "matrix"),
    }
    chosen = {
        r.name: r for r in route_parameters(model, {"rou*": "adamw", "*ier*": "muon", "frozen": "muon"})
    }
    assert (chosen["router"].optimizer, chosen["router"].why) == ("adamw", "pattern rou*")
    assert (chosen["classifier.weight"].optimizer, chosen["classifier.weight"].why) == (
        "muon",
        "pattern *ier*",
    )
    assert chosen["frozen"].optimizer == ""


@distributed(world_size=1)
def test_a_tied_head_is_the_embedding(world: World) -> None:
    routes = {route.name: route for route in route_parameters(make_model(world, tied=True))}
    assert "lm_head.weight" not in routes
    assert routes["embed_tokens.weight"].why == "embedding, tied to lm_head.weight"
    by_other_name = route_parameters(make_model(world, tied=True), {"lm_head.*": "muon"})
    assert by_other_name.names("muon").count("embed_tokens.weight") == 1


@distributed(world_size=1)
def test_wrong_patterns_are_refused(world: World) -> None:
    model = make_model(world)
    for call, error, message in (
        (lambda: route_parameters([model]), TypeError, "the routing is made for a module, got a list"),
        (
            lambda: route_parameters(model, ["norm.weight"]),
            ValueError,
            "patterns are a dict from names of parameters to 'adamw' or 'muon', got a list",
        ),
        (
            lambda: route_parameters(model, {"norm.weight": "sgd"}),
            ValueError,
            r"patterns\['norm.weight'\] is 'sgd'; expected 'adamw' or 'muon'",
        ),
        (
            lambda: route_parameters(model, {"norms.weight": "adamw"}),
            ValueError,
            r"patterns\['norms.weight'\] meets no parameter of the model; close names: norm.weight, ",
        ),
        (
            lambda: route_parameters(model, {"norm.*": "muon"}),
            ValueError,
            r"patterns\['norm.\*'\] gives Muon 'norm.weight' of shape \(4,\), which is no matrix",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
