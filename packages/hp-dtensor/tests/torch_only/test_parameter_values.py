"""Values of parameters that are written, copied and saved."""

import copy
import io
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hp_dtensor
from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_modules import linear_of, loss_of
from placed_tensors import TOLERANCE, TORCH, make_mesh, whole_of


@distributed(2, backends=TORCH)
def test_state_dicts_of_dtensors_and_of_plain_tensors_load(world: World) -> None:
    module, other = linear_of(world), linear_of(world)
    state = module.state_dict()
    assert all(isinstance(v, DTensor) and not v.requires_grad for v in state.values())
    with torch.no_grad():
        other.weight.zero_()
    weight = other.weight
    other.load_state_dict(state)
    assert other.weight is weight
    assert_parity(other.weight, whole_of(world, 3, 5), exact=True)
    # T10: the whole model's checkpoint: every rank takes its piece.
    plain = {"weight": whole_of(world, 3, 5) * 2, "bias": whole_of(world, 3) * 2}
    with count_collectives() as counted:
        other.load_state_dict(plain)
    counted.assert_counts()
    assert_parity(other.weight, plain["weight"], exact=True)
    assert_parity(other.bias, plain["bias"], exact=True)
    other.load_state_dict(state, assign=True)
    assert isinstance(other.weight, nn.Parameter) and isinstance(other.weight, DTensor)
    with pytest.raises(ValueError, match="would write DTensors into a plain tensor"):
        plain["weight"].copy_(module.weight.detach())
    with pytest.raises(ValueError, match="requires grad, beside a DTensor: say how it lies"):
        module.weight.detach().copy_(whole_of(world, 3, 5).requires_grad_())


@pytest.mark.parametrize("at", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@distributed(2, backends=TORCH)
def test_values_are_written_as_the_target_lies(world: World, at: Placement) -> None:
    mesh, whole = make_mesh(world), whole_of(world, 3, 5)
    x = distribute_tensor(torch.zeros_like(whole), mesh, [at])
    local = x.to_local()
    for source in (
        whole,
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Partial()]),
    ):
        assert x.zero_() is x and not x.full_tensor().any()
        assert x.copy_(source) is x and x.placements == (at,) and x.to_local() is local
        assert_parity(x.full_tensor(), whole, rtol=TOLERANCE)
    x.fill_(2.5)
    assert_parity(x.full_tensor(), torch.full_like(whole, 2.5), exact=True)
    x.copy_(whole[0].float())  # broadcast, and cast
    assert_parity(x.full_tensor(), whole[:1].float().double().expand(3, 5), rtol=TOLERANCE)
    assert x.new_zeros(2, 3).placements == x.new_ones((2, 3)).placements == (Replicate(),)
    assert_parity(
        x.new_ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64, device=world.device), exact=True
    )
    assert x.reduce_partial().placements == (Replicate() if at.is_partial() else at,)
    if at.is_partial():
        with pytest.raises(ValueError, match="call reduce_partial"):
            x.type_as(whole.float())
    else:
        assert x.type_as(whole.float()).dtype == torch.float32 and x.type_as(whole) is x


@distributed(2, backends=TORCH)
def test_copies_own_their_memory_or_share_it_as_torchs_do(world: World) -> None:
    module = linear_of(world)
    loss_of(module, world).backward()
    module.weight.note = [1]
    deep = copy.deepcopy(module)
    assert isinstance(deep.weight, nn.Parameter) and deep.weight.requires_grad and deep.weight.note == [1]
    assert deep.weight._spec is module.weight._spec
    assert deep.weight.to_local().data_ptr() != module.weight.to_local().data_ptr()
    assert_parity(deep.weight.grad, module.weight.grad.full_tensor(), exact=True)
    flat = copy.copy(module.weight)
    assert (
        isinstance(flat, nn.Parameter) and flat.to_local().data_ptr() == module.weight.to_local().data_ptr()
    )
    with pytest.raises(RuntimeError, match="made by an operation"):
        copy.deepcopy(module.weight * 2)


@distributed(2, backends=TORCH)
def test_pickles_and_files_hold_the_piece_only(world: World) -> None:
    big = torch.zeros(1000, 5, dtype=torch.float64, device=world.device)
    p = nn.Parameter(DTensor.from_local(big[: 2 - world.rank], make_mesh(world), [Shard(0)], shape=(3, 5)))
    again = pickle.loads(pickle.dumps(p))
    assert isinstance(again, nn.Parameter) and again._spec is p._spec and again.requires_grad
    assert torch.equal(again.to_local(), p.to_local())
    file = io.BytesIO()
    torch.save({"p": p}, file)
    assert file.tell() < 5000
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="rebuild_dtensor"):
        torch.load(file)
    with torch.serialization.safe_globals([hp_dtensor.rebuild_dtensor]):
        file.seek(0)
        loaded = torch.load(file)["p"]
        file.seek(0)
        on_meta = torch.load(file, map_location="meta")["p"]
    assert isinstance(loaded, nn.Parameter) and loaded._spec is p._spec
    assert isinstance(on_meta, DTensor) and on_meta.device.type == "meta"
