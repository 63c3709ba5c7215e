"""What of MindSpore meets a DTensor: each callable gives the unsharded value or is refused, and none works on the wrapper.

Functions of MindSpore look at the object itself, in Python or in C++, before or without dispatch. What they could find there
is a tensor of one string without memory: see [Note: the wrapper] in hp_dtensor._mindspore.tensor.
"""

import copy
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_dtensor import DTensor, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

SPACES = {
    "Tensor": Tensor, "mint": mint, "functional": mint.nn.functional, "linalg": mint.linalg, "special": mint.special, "ops": ops,
}  # fmt: skip
NOT_CALLED = """
    Tensor.__class__ Tensor.__new__ Tensor.__init__ Tensor.__init_subclass__ Tensor.__subclasshook__ Tensor.__getattribute__
    Tensor.__setattr__ Tensor.__delattr__ Tensor.__dir__ Tensor.__hash__ Tensor.__sizeof__ Tensor.__setstate__ Tensor.__repr__
    Tensor.__str__ Tensor.__format__ Tensor.__iter__ Tensor.__reduce_ex__ Tensor.__deepcopy__ Tensor.data_ptr Tensor.register_hook
    Tensor.requires_grad_
    ops.tensordump ops.list_equal ops.list_ge ops.list_gt ops.list_le ops.list_lt ops.tuple_ge ops.tuple_gt ops.tuple_le
    ops.tuple_lt ops.tuple_equal ops.print_
"""
"""What Python itself calls, what gives an answer of its own, writes files, or ends the process for odd arguments."""
SHAPE_ONLY = """
    ops.isreal ops.max ops.min ops.hann_window
"""
"""Functions in Python that ask the tensor for its shape and dtype, which are those of the whole, or for nothing at all.

They give plain tensors, as large and of the same values as of the unsharded tensor. ``max`` and
``min`` give the extreme as a DTensor and MindSpore's constant 0 for its place. ``hann_window`` takes anything for a flag.
"""
RANDOM = """
    bernoulli cauchy cauchy_ dropout dropout1d dropout2d dropout3d exponential_ feature_alpha_dropout geometric_ log_normal
    log_normal_ gumbel_softmax multinomial normal_ rand_like randint_like randn_like random_ random_categorical random_gamma
    random_poisson rrelu shuffle uniform uniform_ laplace gamma normal standard_laplace standard_normal alpha_dropout
"""
"""Whose values are drawn: only shape and dtype are compared."""
OURS = ("DTensor", "on mesh")
"""In messages of this package."""
OF_THE_WRAPPER = ("String", "meta", "user_data", "Cannot iterate over a scalar tensor")
"""In messages of MindSpore about the wrapper, where it looks at it in C++."""


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, two places, and truth values. New ones each time: functions may write."""
    values = np.random.RandomState(0).rand(4, 4).astype(np.float32)
    return Tensor(values), Tensor(np.array([0, 1], np.int64)), Tensor(values > 0.5)


def _arguments(x: Any, i: Any, f: Any) -> list[tuple[Any, ...]]:
    return [
        (x,), (x, x), (x, 0), (x, 1.0), ([x, x],), ((x, x),), (x, x, x), (x, 0, i), (x, i), (x, (1, 0)), (x, 2), (x, (2, 8)),
        (x, 0, 1), (x, 0, 1, 2), (x, 0, i, x), (x, i, x), (x, i, 0), (x, 0, i, 1.0), (x, mindspore.float64), (f,), (f, f), (x, f),
        (x, f, x), (x, f, 1.0), (f, x, x), (i,), (i, 4), (x, (i, i)), (x, (i, i), i), (x, 2, 0), (x, 2, x), (x, lambda z: z),
        ("ij,jk->ik", x, x), (x, x, x, x), (x, [x, x]), (x, "sum"), (2, x), (0.5, x), (x, (0, 0), (2, 2)), ([x], [x]),
    ]  # fmt: skip


def _callables() -> Iterator[tuple[str, Any]]:
    communication = {*mindspore.ops.communication.__all__, "communication"}
    for space, home in SPACES.items():
        for name in sorted(dir(home)):
            function = getattr(home, name, None)
            is_private = name.startswith("_") and not (space == "Tensor" and name.startswith("__"))
            is_class = isinstance(function, (type, types.ModuleType))
            if not callable(function) or is_private or is_class or (space == "ops" and name in communication):
                continue
            if f"{space}.{name}" not in NOT_CALLED.split():
                yield f"{space}.{name}", function


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        nest = list(nest.values())
    return [leaf for x in nest for leaf in _leaves(x)] if isinstance(nest, (tuple, list)) else [nest]


def _plain(function: Any, args: Any) -> list[Any] | None:
    """What it gives of plain tensors; None if these arguments do not suit it, or it has no kernel here."""
    try:
        results = _leaves(function(*args))
        for result in results:
            if isinstance(result, Tensor):
                result.asnumpy()
    except Exception:
        return None
    return results


def _difference(found: list[Any], expected: list[Any], *, drawn: bool) -> str:
    if len(found) != len(expected):
        return f"{len(found)} results, expected {len(expected)}"
    for own, value in zip(found, expected, strict=True):
        if isinstance(own, DTensor) and not isinstance(value, Tensor):
            return f"a DTensor, expected {value!r}"
        if isinstance(own, DTensor):
            own = own.full_tensor()
            if own.shape != value.shape or own.dtype != value.dtype:
                return f"{own.dtype} of shape {own.shape}, expected {value.dtype} of {value.shape}"
            mine, other = own.float().asnumpy(), value.float().asnumpy()
            # Kernels of float32 take several elements at a time, or one.
            if not drawn and not np.allclose(mine, other, rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"values {own}, expected {value}"
        elif not isinstance(own, Tensor) and not callable(own) and own is not value and own != value:
            return f"{own!r}, expected {value!r}"
    return ""


def _way(name: str, function: Any, distribute: Callable[[Tensor], DTensor]) -> str:
    """``right``, ``refused``, ``neither`` (no arguments that we know suit it), or what is wrong."""
    is_method = name.startswith("Tensor.")
    short = name.rpartition(".")[2]
    for position in range(len(_arguments(None, None, None))):
        args = _arguments(*map(distribute, _tensors()))[position]
        if is_method and not isinstance(args[0], DTensor):
            continue
        expected = _plain(function, _arguments(*_tensors())[position])
        try:
            found = _leaves(getattr(args[0], short)(*args[1:]) if is_method else function(*args))
        except Exception as error:
            if expected is None:
                continue
            is_clear = any(word in str(error) for word in (*OURS, *OF_THE_WRAPPER))
            return "refused" if is_clear else f"unclear: arguments {position}: {str(error)[:200]!r}"
        is_silent = any(isinstance(x, (Tensor, np.ndarray)) and not isinstance(x, DTensor) for x in found)
        if is_silent and name not in SHAPE_ONLY.split():
            return f"silent: arguments {position}"
        if expected is not None:
            difference = _difference(found, expected, drawn=short in RANDOM.split())
            return f"wrong: arguments {position}: {difference}" if difference else "right"
    return "neither"


@distributed(1, backends=["mindspore"], timeout=400)
def test_every_callable_of_mindspore_gives_the_unsharded_value_or_is_refused(
    world: World, tmp_path: Path
) -> None:
    mesh = init_device_mesh(world.device_type, (1,))

    def distribute(x: Tensor) -> DTensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # where MindSpore leaves notes about graphs that it could not compile
        ways = {name: _way(name, function, distribute) for name, function in _callables()}
    wrong = {name: way for name, way in ways.items() if way not in ("right", "refused", "neither")}
    assert wrong == {}, "\n".join(f"{name}: {way}" for name, way in wrong.items())
    found = list(ways.values())
    assert found.count("right") > 700 and found.count("right") + found.count("refused") > 950


JOINED: dict[str, Callable[[Any], Any]] = {
    "stack": lambda x: ops.stack([x, x]),
    "stack along another dim": lambda x: ops.stack([x, x], 1),
    "stack along the last dim": lambda x: ops.stack((x, x), axis=-1),
    "the primitive Stack": lambda x: ops.Stack(2)([x, x]),
    "stack with a plain tensor first": lambda x: ops.stack([_tensors()[0], x]),
    "cat": lambda x: mint.cat([x, x], 1),
    "hstack": lambda x: ops.hstack([x, x]),
    "vstack": lambda x: ops.vstack([x, x]),
    "dstack": lambda x: ops.dstack([x, x]),
    "block_diag": lambda x: ops.block_diag(x, x),
}


@distributed(2, backends=["mindspore"])
def test_functions_of_tensors_in_lists_give_the_unsharded_values(world: World) -> None:
    mesh, whole = init_device_mesh(world.device_type, (2,)), _tensors()[0]
    for kind in (lambda x: x, lambda x: mindspore.Parameter(x, name="w")):
        for name, call in JOINED.items():
            for dim in (0, 1):
                found = call(kind(distribute_tensor(whole, mesh, [Shard(dim)])))
                assert isinstance(found, DTensor), name
                assert found.shape == call(whole).shape, name
                assert_parity(found, call(whole), exact=True, name=f"{name} of a tensor cut along {dim}")


@distributed(2, backends=["mindspore"])
def test_what_reads_or_takes_over_memory_is_refused(world: World) -> None:
    mesh, whole = init_device_mesh(world.device_type, (2,)), _tensors()[0]
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for call in (
        lambda: Tensor(x), lambda: mindspore.tensor(x), lambda: Tensor([x, x]), lambda: np.asarray(x), lambda: np.array([x, x]),
        lambda: np.add(x, 1), lambda: x.asnumpy(), lambda: Tensor(x, mindspore.float64), lambda: whole.copy().assign_value(x),
        lambda: mindspore.Parameter(whole).set_data(x), lambda: ops.assign(mindspore.Parameter(whole), x),
        lambda: mindspore.COOTensor(Tensor([[0, 0]]), x[0, :1], (4, 4)), lambda: x.storage(), lambda: x.nbytes,
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="DTensor"):
            call()
    for call in (
        lambda: mindspore.utils.dlpack.to_dlpack(x),
        lambda: Tensor.asnumpy(x),
        lambda: whole.copy().copy_(x),
    ):
        with pytest.raises(RuntimeError):  # MindSpore's own, about the wrapper
            call()


@distributed(2, backends=["mindspore"])
def test_what_python_asks_of_a_dtensor_is_answered_for_the_whole(world: World) -> None:
    mesh, whole = init_device_mesh(world.device_type, (2,)), _tensors()[0]
    for x in (distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)])):
        assert (len(x), x.itemsize, x.is_meta, x.ndim, x.size) == (4, 4, False, 2, 16)
        rows = list(x)
        assert len(rows) == 4
        for row, expected in zip(rows, whole, strict=True):
            assert_parity(row, expected, exact=True)
        assert (
            float(x[1, 2]) == float(whole[1, 2])
            and bool(x[1, 2])
            and int(x[1, 2] * 100) == int(whole[1, 2] * 100)
        )
        assert float(whole[3, 3]) in x and 77 not in x and x[0, 1] in x and "a" not in x
        assert [10, 20, 30][(x[0, 0] * 0 + 1).long()] == 20
        assert str(x) == repr(x) == f"{x}" and "shape=(4, 4)" in str(x)
        for again in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
            assert_parity(again, whole, exact=True)
        with pytest.raises(ValueError, match="0-d DTensor"):
            iter(x[0, 0])
        with pytest.raises(ValueError, match="whole number"):
            range(x[0, 0])
