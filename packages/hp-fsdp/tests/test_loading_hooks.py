"""Hooks on the loading of modules, registered with the framework, run for sharded models as they do for others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import StateDictOptions, fully_shard, get_model_state_dict, set_model_state_dict
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, make_mesh

WHOLE = StateDictOptions(full_state_dict=True)


def renaming(module: Any, values: dict[str, Any], prefix: str, *rest: Any) -> None:
    """From names of an earlier version of the model."""
    if f"{prefix}kernel" in values:
        values[f"{prefix}weight"] = values.pop(f"{prefix}kernel")


def refusing(module: Any, values: Any, prefix: str, metadata: Any, strict: Any, *lists: list[str]) -> None:
    lists[-1].append(f"{prefix}weight is of another model")


def sharded(world: World) -> Any:
    model = PROGRAMS["mlp"].build(Maker(world))
    model.head.register_load_state_dict_pre_hook(renaming)
    for each in (model.head, model):
        fully_shard(each, make_mesh(world))
    return model


def earlier(world: World) -> dict[str, Any]:
    """Whole values with a name that the model has no more."""
    values = dict(get_model_state_dict(sharded(world), options=WHOLE))
    values["head.kernel"] = values.pop("head.weight") * 2
    return values


@pytest.mark.parametrize("way", ["method", "function", "broadcast"])
@distributed(world_size=2)
def test_names_of_earlier_versions_are_read(world: World, way: str) -> None:
    model, values = sharded(world), earlier(world)
    before = dict(values)
    if way == "method":
        assert model.load_state_dict(values) == ([], [])
    elif way == "function":
        assert set_model_state_dict(model, values) == ([], [])
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given = values if world.rank == 0 else {}
        assert set_model_state_dict(model, given, options=options) == ([], [])
    assert list(values) == list(before), "hooks write to a copy"
    found = get_model_state_dict(model, options=WHOLE)
    assert_parity(found["head.weight"], values["head.kernel"], exact=True)


@distributed(world_size=2)
def test_a_module_in_two_places_is_read_by_both_names(world: World) -> None:
    model = PROGRAMS["mlp"].build(Maker(world))
    model.head.register_load_state_dict_pre_hook(renaming)
    model.tail = model.head
    fully_shard(model, make_mesh(world))
    values = dict(get_model_state_dict(model, options=WHOLE))
    for place in ("head", "tail"):
        values[f"{place}.kernel"] = values.pop(f"{place}.weight") * 2
    assert set_model_state_dict(model, dict(values)) == ([], [])
    found = get_model_state_dict(model, options=WHOLE)
    assert_parity(found["tail.weight"], values["head.kernel"], exact=True)


@distributed(world_size=2, backends="torch")
def test_hooks_of_a_compiled_module_are_told_the_version_that_it_was_saved_by(world: World) -> None:
    import torch

    versions = []

    class Layer(torch.nn.Linear):
        _version = 3

    def note(module: Any, values: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        versions.append((prefix, metadata.get("version")))

    def compiled() -> Any:
        model = torch.nn.Sequential(Layer(2, 2, device=world.device))
        model[0].register_load_state_dict_pre_hook(note)
        return torch.nn.Sequential(torch.compile(model[0], backend="eager"))

    plain, wrapped = torch.nn.Sequential(Layer(2, 2, device=world.device)), compiled()
    for values in (plain.state_dict(), wrapped.state_dict()):
        set_model_state_dict(fully_shard(compiled(), make_mesh(world)), values)
    assert versions == [("0.", 3)] * 2


@distributed(world_size=2)
def test_modules_are_told_when_all_values_are_there_inner_ones_first(world: World) -> None:
    platform, seen = world.platform, []
    model = sharded(world)
    values = dict(get_model_state_dict(model, options=WHOLE))
    values["head.bias"] = values["head.bias"] * 0.0

    def told(module: Any, names: Any) -> None:
        with platform.no_grad():
            is_zero = not platform.to_numpy(platform.detach(model.head.bias.to_local())).any()
        seen.append((module is model, is_zero, list(names.unexpected_keys)))
        names.unexpected_keys.clear()

    for each in (model, model.head):
        each.register_load_state_dict_post_hook(told)
    names = set_model_state_dict(
        model, {**values, "tail": values["head.bias"]}, options=StateDictOptions(strict=False)
    )
    assert seen == [(False, True, ["tail"]), (True, True, [])]
    assert names.unexpected_keys == []


@pytest.mark.parametrize("is_broadcast", [False, True])
@distributed(world_size=2)
def test_what_a_hook_reports_is_an_error_on_all_ranks_and_nothing_is_written(
    world: World, is_broadcast: bool
) -> None:
    model = sharded(world)
    before = get_model_state_dict(model, options=WHOLE)
    values = earlier(world)
    model.head.register_load_state_dict_pre_hook(refusing)
    options = StateDictOptions(full_state_dict=is_broadcast, broadcast_from_rank0=is_broadcast)
    message = r"hooks on .* HSDPModel refuse .*: head\.weight is of another model"
    if is_broadcast and world.rank == 1:  # rank 0 alone has values and runs hooks
        message = f"rank 0, which has the values, cannot load: {message}"
    with pytest.raises(RuntimeError, match=message):
        set_model_state_dict(model, values if world.rank == 0 or not is_broadcast else {}, options=options)
    assert_parity(get_model_state_dict(model, options=WHOLE), before, exact=True)


@distributed(world_size=2)
def test_what_a_hook_fails_with_is_said_on_all_ranks(world: World) -> None:
    def failing(*_: Any) -> None:
        raise KeyError("no such version")

    model = sharded(world)
    values = earlier(world)
    model.head.register_load_state_dict_pre_hook(failing)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    error, message = (
        (KeyError, "no such version")
        if world.rank == 0
        else (RuntimeError, "rank 0, .*cannot load: KeyError: .*no such version")
    )
    with pytest.raises(error, match=message):
        set_model_state_dict(model, values if world.rank == 0 else {}, options=options)


@pytest.mark.parametrize("is_broadcast", [False, True])
@distributed(world_size=2)
def test_names_that_hooks_report_are_refused_on_all_ranks_unless_others_strike_them_off(
    world: World, is_broadcast: bool
) -> None:
    def reporting(
        module: Any,
        values: Any,
        prefix: str,
        metadata: Any,
        strict: Any,
        missing: list[str],
        *others: list[str],
    ) -> None:
        missing.append(f"{prefix}scale")
        others[0].append(f"{prefix}zero")

    model = sharded(world)
    values = earlier(world)
    before = get_model_state_dict(model, options=WHOLE)
    model.head.register_load_state_dict_pre_hook(reporting)
    options = StateDictOptions(full_state_dict=is_broadcast, broadcast_from_rank0=is_broadcast)
    given = values if world.rank == 0 or not is_broadcast else {}
    with pytest.raises(RuntimeError, match=r"missing head\.scale; unexpected head\.zero"):
        set_model_state_dict(model, given, options=options)
    assert_parity(get_model_state_dict(model, options=WHOLE), before, exact=True)

    def striking(module: Any, names: Any) -> None:
        names.missing_keys.remove("head.scale")
        names.unexpected_keys.clear()

    model.register_load_state_dict_post_hook(striking)
    assert set_model_state_dict(model, given, options=options) == ([], [])
    found = get_model_state_dict(model, options=WHOLE)
    assert_parity(found["head.weight"], values["head.kernel"], exact=True)


@distributed(world_size=2)
def test_names_that_no_hook_strikes_off_are_refused_when_all_have_looked(world: World) -> None:
    seen = []
    model = sharded(world)
    values = {
        **get_model_state_dict(model, options=WHOLE),
        "tail": world.platform.zeros((2,), "float32", world.device),
    }
    model.register_load_state_dict_post_hook(lambda module, names: seen.append(list(names.unexpected_keys)))
    with pytest.raises(RuntimeError, match="unexpected tail"):
        set_model_state_dict(model, values)
    assert seen == [["tail"]]
