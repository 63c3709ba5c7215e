"""Traps of dispatch that concern DTensors as objects (their texts, copies, memory, ends), T6 to T13: see test_traps."""

import copy
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import (
    DTensor,
    Partial,
    ShardingPlan,
    shard_module,
)
from hp_platform.launch._ports import reserve_ports
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, S1, TORCH, P, R, assert_equal, cut, make_mesh, whole_of


# -------------------------------------------------------------------------------------------------------------------- T6
@distributed(2, backends=TORCH)
def test_t6_dtensors_are_shown_in_texts(world: World) -> None:
    x = cut(world, 5, 4).requires_grad_()
    for at in (S0, R):
        p = nn.Parameter(cut(world, 5, 4, at=at))
        for text in (f"{p}", repr(p), str(p), "%s" % (p,), format(p), f"{[p]}", f"{{'p': {p}}}"):  # noqa: UP031
            assert "shape=(5, 4)" in text and str(at) in text
    with pytest.raises(ValueError, match=r"the data of a DTensor must be a DTensor"):
        x.data = whole_of(world, 5, 4)
    x.register_hook(lambda g: cut(world, 3))
    loss = x.sum()
    with pytest.raises(
        ValueError, match=r"gradient that a hook returns must be a DTensor.*got DTensor\(shape=\(3,\)"
    ):
        loss.backward()
    assert "4" in f"{cut(world, at=R).fill_(4)}"


# -------------------------------------------------------------------------------------------------------------------- T7
@distributed((2, 3), backends=TORCH)
def test_t7_what_changes_nothing_is_the_same_tensor_and_shares_its_mark(world: World) -> None:
    w = [cut(world, 6, 4) for _ in range(3)]

    def reductions(same: Callable[[Any], Any]) -> int:
        x = cut(world, 5, 4, at=R).requires_grad_()
        loss = sum(F.linear(same(x), one).square().sum() for one in w)
        with count_collectives() as counted:
            loss.backward()
        plain = whole_of(world, 5, 4).requires_grad_()
        (3 * F.linear(plain, whole_of(world, 6, 4)).square().sum()).backward()
        assert_equal(x.grad, plain.grad)
        assert set(counted.counts) <= {"all_reduce"}
        return counted.counts["all_reduce"]

    for same in (
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float64),
        lambda x: x.to(x.device),
        lambda x: x.double(),
        lambda x: x.type_as(x),
        lambda x: x.redistribute(placements=[R]),
    ):
        assert reductions(same) == 1
    # Other tensors over the same memory have marks of their own: right, and one reduction each.
    assert reductions(lambda x: x.view(5, 4)) == 3


# -------------------------------------------------------------------------------------------------------------------- T8
@distributed(2, backends=TORCH)
def test_t8_nothing_of_ours_holds_a_parameter_weakly(world: World) -> None:
    p = nn.Parameter(cut(world, 5, 4, at=R))
    p.register_post_accumulate_grad_hook(lambda leaf: None)
    p.register_hook(lambda g: None)
    F.linear(cut(world, 3, 4), p).sum().backward()
    F.linear(cut(world, 3, 4), p)
    assert weakref.getweakrefcount(p) == 0
    other = nn.Parameter(cut(world, 2, 4, at=R))
    torch.utils.swap_tensors(p, other)
    assert (p.shape, other.shape) == ((2, 4), (5, 4))
    known = weakref.ref(p)
    with pytest.raises(RuntimeError, match="weakref"):  # torch's own limit, as of any tensor
        torch.utils.swap_tensors(p, other)
    assert known() is p


# -------------------------------------------------------------------------------------------------------------------- T9
@distributed(2, backends=TORCH)
def test_t9_staging_copies_the_piece_and_no_caches(world: World) -> None:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    w = nn.Parameter(cut(world, 5, 4, at=R))
    (F.linear(cut(world, 3, 4), w) ** 2).sum().backward()
    F.linear(cut(world, 3, 4), w)
    assert (
        w._marks.by_dims and w.grad is not None and w._grad_dtensor is not None
    )  # caches that could be copied
    w.note = "mine"
    staged = StateDictStager(pin_memory=False, share_memory=False).stage({"w": w, "plain": torch.ones(2)})[
        "w"
    ]
    for made in (staged, copy.copy(w), copy.deepcopy(w)):
        assert isinstance(made, DTensor) and made._spec is w._spec and made.note == "mine"
        assert getattr(made, "_marks", None) is None
        assert getattr(made, "_copy_of_view", None) is None
        assert set(vars(made)) <= {"note", "_is_param"}  # torch's mark of a Parameter
    assert getattr(staged, "_grad_dtensor", None) is None
    before = whole_of(world, 5, 4)
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(staged.to_local().cpu(), before.cpu())
    assert staged.to_local().data_ptr() != w.to_local().data_ptr()


# ------------------------------------------------------------------------------------------------------------------- T10
@distributed(2, backends=TORCH)
def test_t10_a_whole_plain_tensor_is_cut_by_copy_and_refused_elsewhere(world: World) -> None:
    for at in (S0, S1, R):
        x = cut(world, 5, 4, at=at).zero_()
        with count_collectives() as counted:
            x.copy_(whole_of(world, 5, 4))
        counted.assert_counts()
        assert_equal(x, whole_of(world, 5, 4), str(at))
        module = nn.Linear(4, 5, bias=False, dtype=torch.float64, device=world.device)
        module.weight = nn.Parameter(x.clone().zero_())
        module.load_state_dict({"weight": whole_of(world, 5, 4)})
        assert_equal(module.weight, whole_of(world, 5, 4), str(at))
    with pytest.raises(ValueError, match="plain tensor"):
        whole_of(world, 5, 4).copy_(x)
    with pytest.raises(ValueError, match="plain tensor"):
        whole_of(world, 5, 4).add_(x)
    with pytest.raises(ValueError, match="requires grad"):
        x.copy_(whole_of(world, 5, 4).requires_grad_())
    with pytest.raises(ValueError, match="requires grad"):
        torch.mul(x, whole_of(world, 5, 4).requires_grad_())


# ------------------------------------------------------------------------------------------------------------------- T11
@distributed(2, backends=TORCH)
def test_t11_a_sum_is_no_parameter(world: World) -> None:
    for kind in ("sum", "avg", "max"):
        x = cut(world, 5, 4, at=Partial(kind))
        with pytest.raises(ValueError, match="cannot be trained"):
            nn.Parameter(x)
        with pytest.raises(ValueError, match="cannot be trained"):
            x.requires_grad_()
        with pytest.raises(ValueError, match="cannot be trained"):
            x.requires_grad = True
        assert not nn.Parameter(x, requires_grad=False).requires_grad
    module = nn.Linear(4, 5, dtype=torch.float64, device=world.device)
    with pytest.raises(ValueError, match="a parameter cannot be a sum"):
        shard_module(module, make_mesh(world), ShardingPlan({"weight": [P]}))


# ------------------------------------------------------------------------------------------------------------------- T12
@distributed(2, backends=TORCH)
def test_t12_inference_tensors_without_a_version_are_used(world: World) -> None:
    w, expected = (
        cut(world, 3, 4, at=R).requires_grad_(),
        F.linear(whole_of(world, 5, 4), whole_of(world, 3, 4)),
    )
    x = cut(world, 5, 4)
    F.linear(x, w)
    with torch.inference_mode():
        for weight in (w, cut(world, 3, 4, at=R), cut(world, 3, 4).redistribute(placements=[R])):
            for _ in range(2):
                y = F.linear(cut(world, 5, 4), weight)
                assert y.is_inference() and not y.requires_grad
                assert_equal(y, expected)
        held = cut(world, 3, 4, at=R)
    assert_equal(F.linear(x, held), expected)  # outside again
    y = F.linear(x, w)
    y.sum().backward()
    assert_equal(w.grad, whole_of(world, 5, 4).sum(0).expand(3, 4))


# ------------------------------------------------------------------------------------------------------------------- T13
PROGRAM = """
import torch
import torch.nn.functional as F
from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
mesh = init_device_mesh("cpu", (2,))
w = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
F.linear(x, w).sum().backward()
kept = w.grad.redistribute(placements=[Shard(1)]), x.redistribute(placements=[Replicate()], async_op=True)
print("done", x.full_tensor().sum().item())
"""


@pytest.mark.once
def test_t13_a_program_that_just_ends_with_dtensors_ends_well() -> None:
    with reserve_ports() as ports:
        place = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports.first),
            "HYPER_PARALLEL_PLATFORM": "torch",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert (rank.returncode, out) == (0, "done 16.0\n"), err
            assert "terminate called" not in err
