"""Wrong ways to make, lay out and move DTensors: what was given, what was expected, what to change."""

from typing import Any

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
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World


def real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def zeros(w: World, *shape: int, at: Any = None) -> Any:
    plain = w.platform.zeros(shape, real(w), w.device)
    return plain if at is None else distribute_tensor(plain, line(w), [at])


def line(w: World) -> DeviceMesh:
    return init_device_mesh(w.device_type, (2,))


def _named(w: World) -> DeviceMesh:
    return init_device_mesh(w.device_type, (2,), mesh_dim_names=("tp",))


# Name -> (the call, the error's type, its text).
TENSORS: dict[str, tuple[Any, type[Exception], str]] = {
    "a list is no tensor": (
        lambda w: distribute_tensor([1.0, 2.0], line(w), [Shard(0)]),
        ValueError,
        "distribute_tensor takes a tensor of .*, got list",
    ),
    "distributed twice": (
        lambda w: distribute_tensor(zeros(w, 4, at=Shard(0)), line(w), [Shard(0)]),
        ValueError,
        r"takes a plain tensor, got a DTensor: use its redistribute\(\)",
    ),
    "from_local of a DTensor": (
        lambda w: DTensor.from_local(zeros(w, 4, at=Shard(0)), line(w), [Shard(0)]),
        ValueError,
        "from_local takes a plain tensor, got a DTensor",
    ),
    "no mesh": (
        lambda w: distribute_tensor(zeros(w, 4), "cpu", [Shard(0)]),
        ValueError,
        "device_mesh must be a hp_platform.DeviceMesh, got str; make one with init_device_mesh",
    ),
    "no mesh at all": (lambda w: distribute_tensor(zeros(w, 4)), RuntimeError, "mesh"),
    "placements for another mesh": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), [Shard(0), Replicate()]),
        ValueError,
        r"got 2 placements .* for a mesh of shape \(2,\); give one per mesh dim",
    ),
    "a dim that is not there": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), [Shard(1)]),
        ValueError,
        r"Shard\(1\) does not fit a tensor with 1 dims",
    ),
    "a piece of another size": (
        lambda w: DTensor.from_local(zeros(w, 3), line(w), [Shard(0)], shape=(4,)),
        ValueError,
        r"the local tensor has shape \(3,\), but the piece of .* has shape \(2,\)",
    ),
    "a source outside of the mesh": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), [Shard(0)], src_data_rank=2),
        ValueError,
        "src_data_rank is a position along every mesh dim of .*, 0 to 1, or None; got 2",
    ),
    "redistributed to other ranks": (
        lambda w: zeros(w, 4, at=Shard(0)).redistribute(DeviceMesh(w.device_type, [0]), [Replicate()]),
        ValueError,
        r"goes to a mesh of the same ranks as .*: to give the tensor to other ranks .* call hp_dtensor.transfer",
    ),
    "a sum as a leaf": (
        lambda w: zeros(w, 4, at=Partial()).requires_grad_(),
        ValueError,
        "cannot be trained: its gradient is Replicate. Redistribute it",
    ),
    "gradients that cannot lie so": (
        lambda w: zeros(w, 4, at=Shard(0)).to_local(grad_placements=[Replicate()]),
        ValueError,
        r"the gradient of Shard\(0\) along mesh dim 0 is Shard\(0\), not Replicate\(\)",
    ),
    "an average of whole numbers": (
        lambda w: DTensor.from_local(
            w.platform.zeros((2,), "int64", w.device), line(w), [Partial("avg")]
        ).full_tensor(),
        ValueError,
        r"Partial\('avg'\) of int64 would round",
    ),
    "a stride without a shape": (
        lambda w: DTensor.from_local(zeros(w, 4), line(w), [Shard(0)], stride=(1,)),
        ValueError,
        r"got stride \(1,\) without shape: give the global shape, too",
    ),
    "a stride that the piece has not": (
        lambda w: DTensor.from_local(zeros(w, 2, 3), line(w), [Shard(0)], shape=(4, 3), stride=(1, 4)),
        ValueError,
        r"strides \(3, 1\) is a piece of a whole of shape \(4, 3\) with strides \(3, 1\): leave stride out",
    ),
    "a placement without a list": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), Shard(0)),
        ValueError,
        r"a sequence with one placement per mesh dim, got Shard\(0\); write \[Shard\(0\)\]",
    ),
    "placements in the place of the mesh": (
        lambda w: zeros(w, 4, at=Shard(0)).redistribute([Replicate()]),
        ValueError,
        r"device_mesh must be a hp_platform.DeviceMesh, got \[Replicate\(\)\]: give it by name, placements=\[Replicate\(\)\]",
    ),
    "names on a mesh without names": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), ("tp",)),
        ValueError,
        r"aliases \('tp',\) are names of mesh dims, but the mesh of shape \(2,\) has none: make it with mesh_dim_names",
    ),
    "a name of another mesh": (
        lambda w: distribute_tensor(zeros(w, 4), _named(w), ("dp",)),
        ValueError,
        "alias 'dp' is no mesh dim; the mesh dims are tp",
    ),
    "names for other dims": (
        lambda w: distribute_tensor(zeros(w, 4), _named(w), ("tp", "None")),
        ValueError,
        r"got 2 aliases \('tp', 'None'\) for a tensor with 1 dims; give one per tensor dim",
    ),
    "a layout of other tensors": (
        lambda w: DTensor.from_local(zeros(w, 2), Layout((2,), ("x",))("x", "None")),
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
        lambda w: distribute_tensor(zeros(w, 4), line(w), [StridedShard(0, 3)]),
        ValueError,
        r"StridedShard\(0, 3\) along mesh dim 0 does not fit: .* into 1 chunks before; give one of these as split_factor",
    ),
    "units for other ranks": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), [RaggedShard((0,), (1, 2, 3))]),
        ValueError,
        "has 3 units for the 2 ranks along mesh dim 0; give one per rank",
    ),
    "units that do not divide": (
        lambda w: distribute_tensor(zeros(w, 4), line(w), [RaggedShard((0,), (2, 1))]),
        ValueError,
        "the 4 cells of shape .* do not divide by the sum of the units, 3; choose units whose sum divides",
    ),
    "pieces that are no chunks": (
        lambda w: DTensor.from_local(zeros(w, 3 + w.rank), line(w), [Shard(0)]),
        ValueError,
        r"the ranks hold shapes \[\(3,\), \(4,\)\], which are not the chunks of one tensor \(sizes \(4, 3\) along dim 0",
    ),
    "dtypes that differ between ranks": (
        lambda w: DTensor.from_local(
            w.platform.zeros((2,), "int64" if w.rank else "int32", w.device),
            line(w),
            [Replicate()],
            run_check=True,
        ),
        ValueError,
        "the ranks along mesh dim 0 disagree: dtype int32, .*; dtype int64",
    ),
    "a tensor for other ranks without a mesh": (
        lambda w: transfer(zeros(w, 4), line(w)),
        ValueError,
        "transfer takes a Layout as target, got DeviceMesh.*: make one with Layout.from_device_mesh",
    ),
    "a plan for a dim that is not there": (
        lambda w: redistribute_plan(zeros(w, 4, at=Shard(0)), placements=[Shard(1)]),
        ValueError,
        r"Shard\(1\) does not fit a tensor with 1 dims: it has dims -1 to 0",
    ),
    "ones of a negative size": (
        lambda w: ones(-1, device_mesh=line(w)),
        ValueError,
        r"a size is whole numbers of 0 or more, or one sequence of them; got \(-1,\)",
    ),
    "a seed in words": (
        lambda w: manual_seed("seven"),  # type: ignore[arg-type]
        ValueError,
        "the seed of a random stream is an int, got 'seven'",
    ),
}
