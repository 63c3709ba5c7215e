"""What an optimizer is told of the rows in which shards lie."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.protocols.flat_shards import FLAT_SHARDS
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, loss_of, make_mesh


def sharded(world: World, name: str = "uneven", **kwargs: Any) -> Any:
    return PROGRAMS[name].shard(PROGRAMS[name].build(Maker(world)), make_mesh(world), **kwargs)


def has_rows(world: World) -> bool:
    return all(world.platform.supports(each, world.device) for each in ("alias", "write_into_view"))


def row_of(parameter: Any) -> Any:
    return getattr(parameter, FLAT_SHARDS).row_of(parameter)


@pytest.mark.parametrize("name", ["uneven", "mlp", "tied", "scalars", "frozen"])
@distributed(world_size=(1, 2, 3))
def test_shards_lie_in_their_row_where_it_says(world: World, name: str) -> None:
    platform, model = world.platform, sharded(world, name)
    rows = {}
    for _, parameter in platform.named_parameters(model):
        row = row_of(parameter)
        if not has_rows(world) or not tuple(parameter.shape):
            assert row is None
            continue
        assert row_of(parameter) is row
        rows[id(row)] = row
        at = next(at for at, other in enumerate(row.parameters) if other is parameter)
        local, size = parameter.to_local(), platform.itemsize(parameter.dtype)
        if int(np.prod(tuple(local.shape))):
            assert platform.data_ptr(local) == platform.data_ptr(row.row) + row.offsets[at] * size
    for row in rows.values():
        assert len({platform.requires_grad(parameter) for parameter in row.parameters}) == 1
        assert list(row.offsets) == sorted(row.offsets)


@distributed(world_size=2)
def test_what_is_written_to_a_row_is_seen_by_shards_and_by_forward(world: World) -> None:
    if not has_rows(world):
        return
    platform, program = world.platform, PROGRAMS["uneven"]
    model = sharded(world, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    x = program.inputs(Maker(world), 0, 0)
    before = platform.to_numpy(platform.detach(model(x)))
    rows = {id(row_of(p)): row_of(p) for _, p in platform.named_parameters(model)}
    for row in rows.values():
        platform.fill_(row.row, 0.0)
    for _, parameter in platform.named_parameters(model):
        assert not platform.to_numpy(platform.detach(parameter.to_local())).any()
    after = platform.to_numpy(platform.detach(model(x)))
    assert before.any()
    assert not after.any()


@distributed(world_size=2)
def test_a_row_written_between_a_forward_and_its_backward_is_noticed(world: World) -> None:
    if not has_rows(world) or not world.platform.supports("version_counter", world.device):
        return
    platform, model = world.platform, sharded(world)
    loss = loss_of(platform, model(PROGRAMS["uneven"].inputs(Maker(world), 0, 0)))
    (_, parameter), *_ = platform.named_parameters(model)
    platform.mul_(row_of(parameter).row, 1.0)
    with pytest.raises(RuntimeError, match="were written between a forward and its backward"):
        platform.backward([loss])


@pytest.mark.parametrize("reduce_dtype", [None, "float64", "float32"])
@distributed(world_size=2)
def test_gradients_of_a_row_lie_in_one_row_behind_a_backward(world: World, reduce_dtype: str | None) -> None:
    if not has_rows(world) or not world.platform.supports("reduce_float64", world.device):
        return
    platform = world.platform
    maker = Maker(world, "float32")
    model = PROGRAMS["uneven"].build(maker)
    fully_shard(model, make_mesh(world), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    platform.backward([loss_of(platform, model(PROGRAMS["uneven"].inputs(maker, 0, 0)))])
    (_, parameter), *_ = platform.named_parameters(model)
    row, starts = row_of(parameter), set()
    for each, offset in zip(row.parameters, row.offsets, strict=True):
        gradient = platform.get_grad(each.to_local())
        assert gradient.dtype == each.dtype
        if int(np.prod(tuple(gradient.shape))):
            starts.add(platform.data_ptr(gradient) - offset * platform.itemsize(gradient.dtype))
    assert len(starts) == 1


@distributed(world_size=2)
def test_without_rows_there_are_none_to_tell(world: World) -> None:
    model = sharded(world, comm_fusion_zero_copy=False)
    assert all(row_of(parameter) is None for _, parameter in world.platform.named_parameters(model))


@distributed(world_size=1)
def test_a_unit_that_is_gone_has_no_rows(world: World) -> None:
    import gc

    platform = world.platform
    model = PROGRAMS["mlp"].build(Maker(world))
    fully_shard(model, make_mesh(world))
    (_, parameter), *_ = platform.named_parameters(model)
    del model
    gc.collect()
    assert row_of(parameter) is None
