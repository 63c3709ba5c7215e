"""Numbers that name no element are refused by the rank that would have it, as by the unsharded operation, and never read as zeros."""

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
@pytest.mark.parametrize("use", USES)
@distributed((2, 3, 4), backends="torch")
def test_a_number_that_no_rank_has_is_refused_where_it_would_lie(use: str, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for rows in (1, 5):
        table = torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2)
        cut = distribute_tensor(table, mesh, [Shard(0)])
        last = min(world.size, -(-rows // -(-rows // world.size))) - 1  # ranks behind it hold nothing
        for number, where in ((rows, last), (rows + 7, last), (-1, 0), (-rows - 1, 0), (-rows - 3, 0)):
            at = torch.tensor([0, number])
            if use == "index" and -rows <= number < 0:  # counts from the end of the whole
                assert torch.equal(USES[use](cut, at).full_tensor(), table[at])
                continue
            with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
                USES[use](table, at)
            for placed in (at, distribute_tensor(at, mesh, [Replicate()])):
                if world.rank == where:
                    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
                        USES[use](cut, placed)
                else:
                    assert not USES[use](cut, placed).to_local()[1:].any()
