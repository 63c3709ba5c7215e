"""What puts together, takes apart, rearranges and looks up, by MindSpore's own functions on two ranks: the unsharded values."""

from collections.abc import Callable
from typing import Any

from mindspore import mint, nn, ops

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

CALLS: dict[str, Callable[..., Any]] = {
    "Tensor.split": lambda x, n, at: x.split(2),
    "mint.split": lambda x, n, at: mint.split(x, [1, 4]),
    "Tensor.chunk": lambda x, n, at: x.chunk(2),
    "mint.chunk": lambda x, n, at: mint.chunk(x, 2),
    "Tensor.unbind": lambda x, n, at: x.unbind(0),
    "mint.unbind": lambda x, n, at: mint.unbind(x, 0),
    "Tensor.tile": lambda x, n, at: x.tile((2, 1)),
    "mint.tile": lambda x, n, at: mint.tile(x, (2, 1)),
    "Tensor.repeat_interleave": lambda x, n, at: x.repeat_interleave(2, 0),
    "Tensor.flip": lambda x, n, at: x.flip((0,)),
    "mint.flip": lambda x, n, at: mint.flip(x, (0,)),
    "ops.rot90": lambda x, n, at: ops.rot90(x, 1, (0, 1)),
    "Tensor.tril": lambda x, n, at: x.tril(),
    "mint.triu": lambda x, n, at: mint.triu(x, 1),
    "Tensor.diagonal": lambda x, n, at: x.diagonal(),
    "ops.diag": lambda x, n, at: ops.diag(n),
    "mint.cat": lambda x, n, at: mint.cat([x, x], 0),
    "ops.cat": lambda x, n, at: ops.cat([x, x], 1),
    "ops.hstack": lambda x, n, at: ops.hstack([x, x]),
    "mint.narrow": lambda x, n, at: mint.narrow(x, 0, 1, 2),
    "Tensor.select": lambda x, n, at: x.select(0, 1),
    "Tensor.movedim": lambda x, n, at: x.movedim(0, 1),
    "Tensor.ravel": lambda x, n, at: x.ravel(),
    "Pad": lambda x, n, at: ops.Pad(((1, 2), (0, 1)))(x),
    "nn.Pad of copies": lambda x, n, at: nn.Pad(((1, 2), (0, 1)), "REFLECT")(x),
    "nn.Pad with the outermost": lambda x, n, at: nn.Pad(((2, 0), (1, 1)), "SYMMETRIC")(x),
    "ops.meshgrid": lambda x, n, at: ops.meshgrid(n, n),
    "mint.meshgrid": lambda x, n, at: mint.meshgrid(n, at[0] * 2, indexing="ij"),
    "Tensor.gather": lambda x, n, at: x.gather(1, at),
    "mint.gather": lambda x, n, at: mint.gather(x, 1, at),
    "ops.gather": lambda x, n, at: ops.gather(x, n, 0),
    "Tensor.index_select": lambda x, n, at: x.index_select(0, n),
    "Tensor.take": lambda x, n, at: x.take(n),
    "Tensor.masked_select": lambda x, n, at: x.masked_select(x > 0),
    "mint.nonzero": lambda x, n, at: mint.nonzero(x),
    "Tensor.bincount": lambda x, n, at: n.bincount(),
    "Tensor.allclose": lambda x, n, at: x.allclose(x),
}


@distributed(2, backends="mindspore")
def test_function_gives_the_unsharded_value(world: World) -> None:
    mesh, platform = init_device_mesh(world.device_type, (2,)), world.platform
    x = platform.reshape(platform.tensor([float((i * 7) % 11 - 5) for i in range(15)], "float32"), (5, 3))
    numbers = platform.tensor([2, 0, 1], "int64")
    places = platform.tensor([[0, 1, 2]] * 5, "int64")
    for name, call in CALLS.items():
        whole = call(x, numbers, places)
        for at in (Shard(0), Shard(1), Replicate()):
            found = call(
                distribute_tensor(x, mesh, [at]),
                distribute_tensor(numbers, mesh, [Replicate()]),
                distribute_tensor(places, mesh, [at]),
            )
            several = isinstance(whole, (tuple, list))
            for got, value in zip(found if several else [found], whole if several else [whole], strict=True):
                if isinstance(value, bool):
                    assert got is value, f"{name} of {at}"
                else:
                    assert_parity(got, value, rtol=0, atol=0, name=f"{name} of {at}")
