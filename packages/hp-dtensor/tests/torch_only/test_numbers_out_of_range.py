"""Numbers that name no element are refused by all ranks that have them, as by the unsharded operation, and never read as zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

USES: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": lambda table, at: F.embedding(at, table),
    "index": lambda table, at: table[at],
    "index_select": lambda table, at: table.index_select(0, at),
    "gather": lambda table, at: table.gather(0, at[:, None].expand(-1, 2)),
}


# Of cpu only: on cuda such a number ends the process by an assertion in the kernel, without DTensors, too.
REFUSED = pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)|out-of-bounds")


@pytest.mark.parametrize("use", USES)
@distributed((2, 3, 4), backends="torch")
def test_a_number_that_no_rank_has_is_refused_by_every_rank(use: str, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for rows in (1, 5):
        table = torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2)
        for number in (rows, rows + 7, -1, -rows - 1, -rows - 3, 2**62, -(2**63)):
            at = torch.tensor([0, number])
            counts_from_end = use == "index" and -rows <= number < 0
            for placement in (Shard(0), Shard(1), Replicate()):
                cut = distribute_tensor(table, mesh, [placement])
                if counts_from_end:
                    assert torch.equal(USES[use](cut, at).full_tensor(), table[at])
                    continue
                for placed in (at, distribute_tensor(at, mesh, [Replicate()])):
                    with REFUSED:
                        USES[use](cut, placed)
            if not counts_from_end:
                with REFUSED:
                    USES[use](table, at)


CUT_WITH: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gather": lambda x, y, at: x.gather(1, at),
    "take_along_dim": lambda x, y, at: x.take_along_dim(at, 1),
    "scatter": lambda x, y, at: x.scatter(1, at, y),
    "scatter_add": lambda x, y, at: x.scatter_add(1, at, y),
    "index_add": lambda x, y, at: x.index_add(0, at[:, 0], y),
    "index_put": lambda x, y, at: torch.zeros_like(x).index_put((at[:, 0],), y, accumulate=True),
    "rows and columns": lambda x, y, at: x.redistribute(placements=[Replicate()])[
        (y[:, 0] * 0).long(), at[:, 0]
    ],
    "cross_entropy": lambda x, y, at: F.cross_entropy(x, at[:, 0]),
    "each loss": lambda x, y, at: F.nll_loss(x, at[:, 0], reduction="none"),
}


@pytest.mark.parametrize("use", CUT_WITH)
@distributed((2, 4), backends="torch")
def test_a_number_of_a_whole_tensor_that_is_cut_with_another_one_is_refused_by_every_rank(
    use: str, world: World
) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    x = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    call, at = CUT_WITH[use], torch.tensor([[0], [2], [1]])
    whole = distribute_tensor(at, mesh, [Replicate()])
    for i in range(3):
        bad = at.clone()
        bad[i] = 3
        cut = distribute_tensor(x, mesh, [Shard(0)])
        y = distribute_tensor(x[:, :1] if "scatter" in use else x, mesh, [Shard(0)])
        plain = x.clone() if use != "rows and columns" else cut.full_tensor()
        if use != "rows and columns":
            expected = call(plain, x[:, :1] if "scatter" in use else x, at)
            assert torch.allclose(call(cut, y, whole).full_tensor(), expected)
        with REFUSED:
            call(cut, y, distribute_tensor(bad, mesh, [Replicate()]))


WRITES: dict[str, Callable[[Any, Any], None]] = {
    "rows": lambda x, at: x.__setitem__(at, 7.0),
    "a column's rows": lambda x, at: x.__setitem__((at, 0), 7.0),
    "columns of a row": lambda x, at: x.__setitem__((0, at), 7.0),
    "columns of some rows": lambda x, at: x.__setitem__((slice(0, 1), at), 7.0),
    "pairs": lambda x, at: x.__setitem__((at, torch.tensor([0, 1])), 7.0),
    "pairs the other way": lambda x, at: x.__setitem__((torch.tensor([0, 1]), at), 7.0),
}


@pytest.mark.parametrize("use", WRITES)
@distributed((2, 4), backends="torch")
def test_a_number_to_write_at_that_no_rank_has_is_refused_by_every_rank(use: str, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for placement in (Shard(0), Shard(1), Replicate()):
        plain = torch.zeros(3, 3)
        x = distribute_tensor(plain, mesh, [placement])
        for good in (torch.tensor([1, 2]), torch.tensor([0, -1])):
            WRITES[use](plain, good)
            WRITES[use](x, good)
            assert torch.equal(x.full_tensor(), plain)
        for number in (3, -4, 2**62):
            with REFUSED:
                WRITES[use](x, torch.tensor([0, number]))


TAKEN: dict[str, Callable[[Any, Any], Any]] = {
    "index_fill counts from the end": lambda x, at: x.index_fill(1, at - 1, 7.0),
    "take_along_dim counts from the end": lambda x, at: x.take_along_dim(at[None, :] - 1, 1),
    "nothing of what there is not": lambda x, at: x[:, :0].gather(0, (at + 9)[:, None].expand(3, 0)),
    "nothing written where there is nothing": lambda x, at: x[:, :0].index_copy(0, at + 9, x[:, :0]),
}


@pytest.mark.parametrize("use", TAKEN)
@distributed((2, 4), backends="torch")
def test_a_number_that_the_unsharded_operation_takes_is_taken_by_ranks_without_elements_too(
    use: str, world: World
) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    x, at = torch.arange(9, dtype=torch.float64).reshape(3, 3), torch.tensor([0, 2, 1])
    for placement in (Shard(0), Shard(1), Replicate()):
        for placed in (Shard(0), Replicate()):
            found = TAKEN[use](distribute_tensor(x, mesh, [placement]), distribute_tensor(at, mesh, [placed]))
            assert torch.equal(found.full_tensor(), TAKEN[use](x, at))


@distributed(2, backends="torch")
def test_targets_that_are_ignored_are_no_classes(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    scores, targets = torch.arange(12.0).reshape(4, 3), torch.tensor([-100, 1, 2, -100])
    cut, whole = distribute_tensor(scores, mesh, [Shard(0)]), distribute_tensor(targets, mesh, [Replicate()])
    assert torch.allclose(F.cross_entropy(cut, whole).full_tensor(), F.cross_entropy(scores, targets))
    scores, some = scores[:, :2], targets.where(targets != 2, 0)
    cut = distribute_tensor(scores, mesh, [Shard(0)])
    for ignored in (5, 1):
        targets = some.where(some != -100, ignored)
        whole = distribute_tensor(targets, mesh, [Replicate()])
        found = F.nll_loss(cut, whole, ignore_index=ignored)
        assert torch.allclose(found.full_tensor(), F.nll_loss(scores, targets, ignore_index=ignored))
