"""How often an exchange copies what a rank holds, beside what the collective moves."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import Shard, distribute_tensor
from hp_platform import DeviceMesh
from hp_platform.testing import World, distributed


class _Copies(TorchDispatchMode):
    """Counts the operators that copy, on both sides of the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()
        self.has_run = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            self.has_run = True
        elif name in ("clone", "copy_", "cat", "_to_copy", "stack", "contiguous"):
            (self.after if self.has_run else self.before)[name] += 1
        return func(*args, **(kwargs or {}))


def _copies(mesh: DeviceMesh, shape: tuple[int, ...], source: int, target: int) -> tuple[int, int]:
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    x = distribute_tensor(full, mesh, [Shard(source)])
    with torch.no_grad(), _Copies() as copies:
        y = x.redistribute(placements=[Shard(target)])
    assert copies.has_run
    assert torch.equal(y.full_tensor(), full)
    return copies.before.total(), copies.after.total()


@distributed(world_size=(2, 3), backends=("torch",))
def test_an_exchange_copies_once_before_and_once_behind_and_not_where_dim_0_is_concerned(
    world: World,
) -> None:
    mesh = DeviceMesh("cpu", list(range(world.size)))
    for shape in ((6, 12, 18), (8, 5, 11)):
        is_even = all(size % world.size == 0 for size in shape)
        for source in range(3):
            for target in range(3):
                if source == target:
                    continue
                before, after = _copies(mesh, shape, source, target)
                way = f"{shape} from {source} to {target} on {world.size}"
                assert before == (target != 0), way
                # Pieces of different sizes arrive one after the other, and are always put together.
                assert after == (source != 0 if is_even else 1), way
