"""A user's mistakes, each with its message: what was given, what was expected, what to change."""

from typing import Any

import pytest

from hp_dtensor import (
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    manual_seed,
    ones,
    redistribute_plan,
    transfer,
)
from hp_dtensor.rules import rule
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


def _named(w: World) -> DeviceMesh:
    return init_device_mesh(w.device_type, (2,), mesh_dim_names=("tp",))


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
        lambda w: _zeros(w, 4, 4, at=Shard(0)).geqrf(),
        NotImplementedError,
        r"geqrf has no rule for DTensors; got \(Shard\(0\),\) of \(4, 4\) .*Ways out: x.full_tensor\(\)",
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
    "a placement without a list": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), Shard(0)),
        ValueError,
        r"a sequence with one placement per mesh dim, got Shard\(0\); write \[Shard\(0\)\]",
    ),
    "placements in the place of the mesh": (
        lambda w: _zeros(w, 4, at=Shard(0)).redistribute([Replicate()]),
        ValueError,
        r"device_mesh must be a hp_platform.DeviceMesh, got \[Replicate\(\)\]: give it by name, placements=\[Replicate\(\)\]",
    ),
    "names on a mesh without names": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), ("tp",)),
        ValueError,
        r"aliases \('tp',\) are names of mesh dims, but the mesh of shape \(2,\) has none: make it with mesh_dim_names",
    ),
    "a name of another mesh": (
        lambda w: distribute_tensor(_zeros(w, 4), _named(w), ("dp",)),
        ValueError,
        "alias 'dp' is no mesh dim; the mesh dims are tp",
    ),
    "names for other dims": (
        lambda w: distribute_tensor(_zeros(w, 4), _named(w), ("tp", "None")),
        ValueError,
        r"got 2 aliases \('tp', 'None'\) for a tensor with 1 dims; give one per tensor dim",
    ),
    "a layout of other tensors": (
        lambda w: DTensor.from_local(_zeros(w, 2), Layout((2,), ("x",))("x", "None")),
        ValueError,
        "is of tensors with 2 dims, the tensor has 1",
    ),
    "an unknown reduction": (
        lambda w: Partial("median"),
        ValueError,
        r"Partial\(reduce_op\) takes one of 'sum', 'avg', 'max', 'min', 'prod', 'all', 'any', got 'median'",
    ),
    "half a dim": (
        lambda w: Shard(0.5),  # type: ignore[arg-type]
        ValueError,
        r"Shard\(dim\) takes a tensor dim as an int, got 0.5",
    ),
    "a factor that nothing cuts": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), [StridedShard(0, 3)]),
        ValueError,
        r"StridedShard\(0, 3\) along mesh dim 0 does not fit: .* into 1 chunks before; give one of these as split_factor",
    ),
    "units for other ranks": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), [RaggedShard((0,), (1, 2, 3))]),
        ValueError,
        "has 3 units for the 2 ranks along mesh dim 0; give one per rank",
    ),
    "units that do not divide": (
        lambda w: distribute_tensor(_zeros(w, 4), _line(w), [RaggedShard((0,), (2, 1))]),
        ValueError,
        "the 4 cells of shape .* do not divide by the sum of the units, 3; choose units whose sum divides",
    ),
    "pieces that are no chunks": (
        lambda w: DTensor.from_local(_zeros(w, 3 + w.rank), _line(w), [Shard(0)]),
        ValueError,
        r"the ranks hold shapes \[\(3,\), \(4,\)\], which are not the chunks of one tensor \(sizes \(4, 3\) along dim 0",
    ),
    "dtypes that differ between ranks": (
        lambda w: DTensor.from_local(
            w.platform.zeros((2,), "int64" if w.rank else "int32", w.device),
            _line(w),
            [Replicate()],
            run_check=True,
        ),
        ValueError,
        "the ranks along mesh dim 0 disagree: dtype int32, .*; dtype int64",
    ),
    "a tensor for other ranks without a mesh": (
        lambda w: transfer(_zeros(w, 4), _line(w)),
        ValueError,
        "transfer takes a Layout as target, got DeviceMesh.*: make one with Layout.from_device_mesh",
    ),
    "a plan for a dim that is not there": (
        lambda w: redistribute_plan(_zeros(w, 4, at=Shard(0)), placements=[Shard(1)]),
        ValueError,
        r"Shard\(1\) does not fit a tensor with 1 dims: it has dims -1 to 0",
    ),
    "a dim to turn that is not there": (
        lambda w: _zeros(w, 4, 2, at=Shard(0)).transpose(0, 2),
        ValueError,
        r"transpose of \(Shard\(0\),\) of \(4, 2\) .*: dim 2 does not fit a tensor with 2 dims",
    ),
    "a dim twice": (
        lambda w: _zeros(w, 4, 2, at=Shard(0)).permute(0, 0),
        ValueError,
        r"permute of .*: dim \(0, 0\) names a dim twice",
    ),
    "two sizes to be found": (
        lambda w: _zeros(w, 4, 2, at=Shard(0)).reshape(-1, -1),
        ValueError,
        r"shape \(-1, -1\) does not hold the 8 elements of a tensor of shape \(4, 2\)",
    ),
    "the shape of another": (
        lambda w: _zeros(w, 4, at=Shard(0)).view_as(_zeros(w, 3, at=Shard(0))),
        ValueError,
        r"shape \(3,\) does not hold the 4 elements of a tensor of shape \(4,\)",
    ),
    "stretching what is there": (
        lambda w: _zeros(w, 4, 2, at=Shard(0)).expand(4, 3),
        ValueError,
        r"cannot expand shape \(4, 2\) to \(4, 3\): only dims of size 1 stretch",
    ),
    "a dim of softmax that is not there": (
        lambda w: _zeros(w, 4, 2, at=Shard(0)).softmax(3),
        ValueError,
        "softmax of .*: dim 3 does not fit a tensor with 2 dims",
    ),
    "no chunks": (
        lambda w: _zeros(w, 4, at=Shard(0)).chunk(0),
        ValueError,
        "the number of chunks must be a positive int, got 0",
    ),
    "sizes with another sum": (
        lambda w: _zeros(w, 4, at=Shard(0)).split([1, 2]),
        ValueError,
        r"sizes \(1, 2\) must be whole numbers with the sum 4, the size of dim 0",
    ),
    "more of the largest than there are": (
        lambda w: _zeros(w, 4, at=Shard(0)).topk(5),
        ValueError,
        "k = 5 of a dim of size 4: there are not so many",
    ),
    "the truth of several": (
        lambda w: bool(_zeros(w, 4, at=Shard(0))),
        ValueError,
        r"of a DTensor of shape \(4,\): it needs exactly one element",
    ),
    "a number of several": (
        lambda w: float(_zeros(w, 4, at=Shard(0))),
        ValueError,
        r"of a DTensor of shape \(4,\): it needs exactly one element",
    ),
    "an index that is no place": (
        lambda w: _zeros(w, 4, at=Shard(0))[1.5],
        ValueError,
        "an index is an int, a slice, None, ..., a tensor or a list of ints, got 1.5",
    ),
    "more indices than dims": (
        lambda w: _zeros(w, 4, at=Shard(0))[0, 0],
        IndexError,
        "an index for 2 dims does not fit a tensor with 1 dims",
    ),
    "a value that does not fit its part": (
        lambda w: _zeros(w, 4, 2, at=Shard(0)).__setitem__(0, _zeros(w, 3)),
        ValueError,
        r"a value of shape \(3,\) does not fit a part of shape \(2,\)",
    ),
    "ones of a negative size": (
        lambda w: ones(-1, device_mesh=_line(w)),
        ValueError,
        r"a size is whole numbers of 0 or more, or one sequence of them; got \(-1,\)",
    ),
    "a seed in words": (
        lambda w: manual_seed("seven"),  # type: ignore[arg-type]
        ValueError,
        "the seed of a random stream is an int, got 'seven'",
    ),
    "a second rule of one name": (
        lambda w: rule("add")(lambda x: x),
        ValueError,
        "there is a rule 'add' already; choose another name",
    ),
    "a matrix by a number": (
        lambda w: _zeros(w, 4, at=Shard(0)) @ _zeros(w, at=Replicate()),
        ValueError,
        r"matmul needs vectors or matrices, got shapes \(4,\) and \(\)",
    ),
}


@pytest.mark.once
def test_there_are_more_than_forty_wrong_calls() -> None:
    assert len(CALLS) >= 40


@pytest.mark.parametrize("case", CALLS)
@distributed(world_size=2)
def test_wrong_call_is_refused(case: str, world: World) -> None:
    call, kind, text = CALLS[case]
    with pytest.raises(kind, match=text):
        call(world)
