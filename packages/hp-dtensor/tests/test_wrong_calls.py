"""A user's mistakes, each with its message: what was given, what was expected, what to change."""

from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, distributed


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _leaf(w: World) -> Any:
    return w.platform.set_requires_grad_(w.platform.zeros((4,), _real(w), w.device), True)


def _zeros(w: World, *shape: int, at: Any = None) -> Any:
    plain = w.platform.zeros(shape, _real(w), w.device)
    return plain if at is None else distribute_tensor(plain, _line(w), [at])


def _line(w: World) -> DeviceMesh:
    return init_device_mesh(w.device_type, (2,))


def _other(w: World) -> DeviceMesh:
    return DeviceMesh(w.device_type, [1, 0])


# Name -> (the call, the error's type, its text).
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "a list is no tensor": (
        lambda w: distribute_tensor([1.0, 2.0], _line(w), [Shard(0)]),
        ValueError,
        "distribute_tensor takes a tensor of .*, got list",
    ),
    "distributed twice": (
        lambda w: distribute_tensor(_zeros(w, 4, at=Shard(0)), _line(w), [Shard(0)]),
        ValueError,
        r"takes a plain tensor, got a DTensor: use its redistribute\(\)",
    ),
    "from_local of a DTensor": (
        lambda w: DTensor.from_local(_zeros(w, 4, at=Shard(0)), _line(w), [Shard(0)]),
        ValueError,
        "from_local takes a plain tensor, got a DTensor",
    ),
    "no mesh": (
        lambda w: distribute_tensor(_zeros(w, 4), "cpu", [Shard(0)]),
        ValueError,
        "device_mesh must be a hp_platform.DeviceMesh, got str; make one with init_device_mesh",
    ),
    "no mesh at all": (lambda w: distribute_tensor(_zeros(w, 4)), RuntimeError, "mesh"),
    "placements for another mesh": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), [Shard(0), Replicate()]),
        ValueError,
        r"got 2 placements .* for a mesh of shape \(2,\); give one per mesh dim",
    ),
    "a dim that is not there": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), [Shard(1)]),
        ValueError,
        r"Shard\(1\) does not fit a tensor with 1 dims",
    ),
    "a piece of another size": (
        lambda w: DTensor.from_local(_zeros(w, 3), _line(w), [Shard(0)], shape=(4,)),
        ValueError,
        r"the local tensor has shape \(3,\), but the piece of .* has shape \(2,\)",
    ),
    "a source outside of the mesh": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), [Shard(0)], src_data_rank=2),
        ValueError,
        "src_data_rank is a position along every mesh dim of .*, 0 to 1, or None; got 2",
    ),
    "redistributed to other ranks": (
        lambda w: _zeros(w, 4, at=Shard(0)).redistribute(DeviceMesh(w.device_type, [0]), [Replicate()]),
        ValueError,
        r"goes to a mesh of the same ranks as .*: to give the tensor to other ranks .* call hp_dtensor.transfer",
    ),
    "two meshes in one operation": (
        lambda w: _zeros(w, 4, at=Shard(0)) + distribute_tensor(_zeros(w, 4), _other(w), [Shard(0)]),
        ValueError,
        "got DTensors on two meshes",
    ),
    "a trained plain tensor beside a DTensor": (
        lambda w: _zeros(w, 4, at=Shard(0)) * _leaf(w),
        ValueError,
        r"argument 1 of .* is a plain tensor of shape \(4,\) that requires grad, beside a DTensor: say how it lies",
    ),
    "shapes that do not broadcast": (
        lambda w: _zeros(w, 4, at=Shard(0)) + _zeros(w, 3, at=Shard(0)),
        ValueError,
        r"shapes \(4,\), \(3,\) do not broadcast",
    ),
    "inner sizes that differ": (
        lambda w: _zeros(w, 4, 3, at=Shard(0)) @ _zeros(w, 4, 3, at=Shard(0)),
        ValueError,
        r"matmul of shapes \(4, 3\) and \(4, 3\): the inner sizes 3 and 4 differ",
    ),
    "a view with another number of elements": (
        lambda w: _zeros(w, 4, 3, at=Shard(0)).view(5, 2),
        ValueError,
        r"shape \(5, 2\) does not hold the 12 elements of a tensor of shape \(4, 3\)",
    ),
    "a dim to sum that is not there": (
        lambda w: _zeros(w, 4, at=Shard(0)).sum(1),
        ValueError,
        "dim 1 does not fit a tensor with 1 dims",
    ),
    "a builtin without a rule": (
        lambda w: _zeros(w, 4, at=Shard(0)).renorm(2, 0, 1.0),
        NotImplementedError,
        r"renorm has no rule for DTensors; got \(Shard\(0\),\) of \(4,\) .*Ways out: x.full_tensor\(\)",
    ),
    "reading an element that is not there": (
        lambda w: _zeros(w, 4, at=Shard(0))[4],
        IndexError,
        "index 4 is out of range for dim 0 of size 4",
    ),
    "in place into another shape": (
        lambda w: _zeros(w, 4, 1, at=Shard(0)).add_(_zeros(w, 4, 3, at=Shard(0))),
        ValueError,
        "would change the shape of the tensor that it writes from \\(4, 1\\) to \\(4, 3\\)",
    ),
    "in place into whole numbers": (
        lambda w: (_zeros(w, 4, at=Replicate()) > 0).mul_(_zeros(w, 4, at=Shard(0))),
        ValueError,
        "cannot write float(64|32) into a tensor of bool",
    ),
    "numpy of a shard": (
        lambda w: _zeros(w, 4, at=Shard(0)).numpy(),
        NotImplementedError,
        "numpy has no rule for DTensors",
    ),
    "item of several": (
        lambda w: _zeros(w, 4, at=Shard(0)).item(),
        ValueError,
        r"item\(\) of a DTensor of shape \(4,\): it needs exactly one element",
    ),
    "backward from several": (
        lambda w: (_zeros(w, 4, at=Shard(0)).requires_grad_() * 2).backward(),
        ValueError,
        r"backward of a DTensor of shape \(4,\) needs its gradient",
    ),
    "a gradient of another shape": (
        lambda w: (_zeros(w, 4, at=Shard(0)).requires_grad_() * 2).backward(_zeros(w, 3)),
        ValueError,
        r"gradient has shape \(3,\), the tensor \(4,\)",
    ),
    "a sum as a leaf": (
        lambda w: _zeros(w, 4, at=Partial()).requires_grad_(),
        ValueError,
        "cannot be trained: its gradient is Replicate. Redistribute it",
    ),
    "gradients that cannot lie so": (
        lambda w: _zeros(w, 4, at=Shard(0)).to_local(grad_placements=[Replicate()]),
        ValueError,
        r"the gradient of Shard\(0\) along mesh dim 0 is Shard\(0\), not Replicate\(\)",
    ),
    "a plain gradient on a DTensor": (
        lambda w: setattr(_zeros(w, 4, at=Shard(0)).requires_grad_(), "grad", _zeros(w, 4)),
        ValueError,
        "the gradient must be a DTensor of",
    ),
    "an average of whole numbers": (
        lambda w: DTensor.from_local(
            w.platform.zeros((2,), "int64", w.device), _line(w), [Partial("avg")]
        ).full_tensor(),
        ValueError,
        r"Partial\('avg'\) of int64 would round",
    ),
    "a dict as operand": (
        lambda w: _zeros(w, 4, at=Shard(0)).add({}),
        ValueError,
        "got a dict, with which rule 'add' can do nothing: give tensors, numbers or tuples",
    ),
    "length of a scalar": (
        lambda w: len(_zeros(w, at=Replicate())),
        ValueError,
        "a 0-d DTensor has no length",
    ),
    "written from a tensor of another shape": (
        lambda w: _zeros(w, 4, at=Shard(0)).copy_(_zeros(w, 3)),
        ValueError,
        r"\(3,\).*\(4,\)",
    ),
    "a stride without a shape": (
        lambda w: DTensor.from_local(_zeros(w, 4), _line(w), [Shard(0)], stride=(1,)),
        ValueError,
        r"got stride \(1,\) without shape: give the global shape, too",
    ),
    "a stride that the piece has not": (
        lambda w: DTensor.from_local(_zeros(w, 2, 3), _line(w), [Shard(0)], shape=(4, 3), stride=(1, 4)),
        ValueError,
        r"strides \(3, 1\) is a piece of a whole of shape \(4, 3\) with strides \(3, 1\): leave stride out",
    ),
}


@pytest.mark.parametrize("case", CALLS)
@distributed(world_size=2)
def test_wrong_call_is_refused(case: str, world: World) -> None:
    call, kind, text = CALLS[case]
    with pytest.raises(kind, match=text):
        call(world)
