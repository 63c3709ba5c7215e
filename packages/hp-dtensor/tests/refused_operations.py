"""Wrong operations on DTensors: what was given, what was expected, what to change."""

import sys
from pathlib import Path
from typing import Any

from hp_dtensor import (
    Replicate,
    Shard,
    distribute_tensor,
)
from hp_dtensor.rules import rule
from hp_platform import DeviceMesh
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from refused_tensors import real, zeros


def _leaf(w: World) -> Any:
    return w.platform.set_requires_grad_(w.platform.zeros((4,), real(w), w.device), True)


def _other(w: World) -> DeviceMesh:
    return DeviceMesh(w.device_type, [1, 0])


# Name -> (the call, the error's type, its text).
OPERATIONS: dict[str, tuple[Any, type[Exception], str]] = {
    "two meshes in one operation": (
        lambda w: zeros(w, 4, at=Shard(0)) + distribute_tensor(zeros(w, 4), _other(w), [Shard(0)]),
        ValueError,
        "got DTensors on two meshes",
    ),
    "a trained plain tensor beside a DTensor": (
        lambda w: zeros(w, 4, at=Shard(0)) * _leaf(w),
        ValueError,
        r"argument 1 of .* is a plain tensor of shape \(4,\) that requires grad, beside a DTensor: say how it lies",
    ),
    "shapes that do not broadcast": (
        lambda w: zeros(w, 4, at=Shard(0)) + zeros(w, 3, at=Shard(0)),
        ValueError,
        r"shapes \(4,\), \(3,\) do not broadcast",
    ),
    "inner sizes that differ": (
        lambda w: zeros(w, 4, 3, at=Shard(0)) @ zeros(w, 4, 3, at=Shard(0)),
        ValueError,
        r"matmul of shapes \(4, 3\) and \(4, 3\): the inner sizes 3 and 4 differ",
    ),
    "a view with another number of elements": (
        lambda w: zeros(w, 4, 3, at=Shard(0)).view(5, 2),
        ValueError,
        r"shape \(5, 2\) does not hold the 12 elements of a tensor of shape \(4, 3\)",
    ),
    "a dim to sum that is not there": (
        lambda w: zeros(w, 4, at=Shard(0)).sum(1),
        ValueError,
        "dim 1 does not fit a tensor with 1 dims",
    ),
    "a builtin without a rule": (
        lambda w: zeros(w, 4, 4, at=Shard(0)).geqrf(),
        NotImplementedError,
        r"geqrf has no rule for DTensors; got \(Shard\(0\),\) of \(4, 4\) .*Ways out: x.full_tensor\(\)",
    ),
    "reading an element that is not there": (
        lambda w: zeros(w, 4, at=Shard(0))[4],
        IndexError,
        "index 4 is out of range for dim 0 of size 4",
    ),
    "in place into another shape": (
        lambda w: zeros(w, 4, 1, at=Shard(0)).add_(zeros(w, 4, 3, at=Shard(0))),
        ValueError,
        "would change the shape of the tensor that it writes from \\(4, 1\\) to \\(4, 3\\)",
    ),
    "in place into whole numbers": (
        lambda w: (zeros(w, 4, at=Replicate()) > 0).mul_(zeros(w, 4, at=Shard(0))),
        ValueError,
        "cannot write float(64|32) into a tensor of bool",
    ),
    "numpy of a shard": (
        lambda w: zeros(w, 4, at=Shard(0)).numpy(),
        NotImplementedError,
        "numpy has no rule for DTensors",
    ),
    "item of several": (
        lambda w: zeros(w, 4, at=Shard(0)).item(),
        ValueError,
        r"item\(\) of a DTensor of shape \(4,\): it needs exactly one element",
    ),
    "backward from several": (
        lambda w: (zeros(w, 4, at=Shard(0)).requires_grad_() * 2).backward(),
        ValueError,
        r"backward of a DTensor of shape \(4,\) needs its gradient",
    ),
    "a gradient of another shape": (
        lambda w: (zeros(w, 4, at=Shard(0)).requires_grad_() * 2).backward(zeros(w, 3)),
        ValueError,
        r"gradient has shape \(3,\), the tensor \(4,\)",
    ),
    "a plain gradient on a DTensor": (
        lambda w: setattr(zeros(w, 4, at=Shard(0)).requires_grad_(), "grad", zeros(w, 4)),
        ValueError,
        "the gradient must be a DTensor of",
    ),
    "a dict as operand": (
        lambda w: zeros(w, 4, at=Shard(0)).add({}),
        ValueError,
        "got a dict, with which rule 'add' can do nothing: give tensors, numbers or tuples",
    ),
    "length of a scalar": (
        lambda w: len(zeros(w, at=Replicate())),
        ValueError,
        "a 0-d DTensor has no length",
    ),
    "written from a tensor of another shape": (
        lambda w: zeros(w, 4, at=Shard(0)).copy_(zeros(w, 3)),
        ValueError,
        r"\(3,\).*\(4,\)",
    ),
    "a dim to turn that is not there": (
        lambda w: zeros(w, 4, 2, at=Shard(0)).transpose(0, 2),
        ValueError,
        r"transpose of \(Shard\(0\),\) of \(4, 2\) .*: dim 2 does not fit a tensor with 2 dims",
    ),
    "a dim twice": (
        lambda w: zeros(w, 4, 2, at=Shard(0)).permute(0, 0),
        ValueError,
        r"permute of .*: dim \(0, 0\) names a dim twice",
    ),
    "two sizes to be found": (
        lambda w: zeros(w, 4, 2, at=Shard(0)).reshape(-1, -1),
        ValueError,
        r"shape \(-1, -1\) does not hold the 8 elements of a tensor of shape \(4, 2\)",
    ),
    "the shape of another": (
        lambda w: zeros(w, 4, at=Shard(0)).view_as(zeros(w, 3, at=Shard(0))),
        ValueError,
        r"shape \(3,\) does not hold the 4 elements of a tensor of shape \(4,\)",
    ),
    "stretching what is there": (
        lambda w: zeros(w, 4, 2, at=Shard(0)).expand(4, 3),
        ValueError,
        r"cannot expand shape \(4, 2\) to \(4, 3\): only dims of size 1 stretch",
    ),
    "a dim of softmax that is not there": (
        lambda w: zeros(w, 4, 2, at=Shard(0)).softmax(3),
        ValueError,
        "softmax of .*: dim 3 does not fit a tensor with 2 dims",
    ),
    "no chunks": (
        lambda w: zeros(w, 4, at=Shard(0)).chunk(0),
        ValueError,
        "the number of chunks must be a positive int, got 0",
    ),
    "sizes with another sum": (
        lambda w: zeros(w, 4, at=Shard(0)).split([1, 2]),
        ValueError,
        r"sizes \(1, 2\) must be whole numbers with the sum 4, the size of dim 0",
    ),
    "more of the largest than there are": (
        lambda w: zeros(w, 4, at=Shard(0)).topk(5),
        ValueError,
        "k = 5 of a dim of size 4: there are not so many",
    ),
    "the truth of several": (
        lambda w: bool(zeros(w, 4, at=Shard(0))),
        ValueError,
        r"of a DTensor of shape \(4,\): it needs exactly one element",
    ),
    "a number of several": (
        lambda w: float(zeros(w, 4, at=Shard(0))),
        ValueError,
        r"of a DTensor of shape \(4,\): it needs exactly one element",
    ),
    "an index that is no place": (
        lambda w: zeros(w, 4, at=Shard(0))[1.5],
        ValueError,
        "an index is an int, a slice, None, ..., a tensor or a list of ints, got 1.5",
    ),
    "more indices than dims": (
        lambda w: zeros(w, 4, at=Shard(0))[0, 0],
        IndexError,
        "an index for 2 dims does not fit a tensor with 1 dims",
    ),
    "a value that does not fit its part": (
        lambda w: zeros(w, 4, 2, at=Shard(0)).__setitem__(0, zeros(w, 3)),
        ValueError,
        r"a value of shape \(3,\) does not fit a part of shape \(2,\)",
    ),
    "a second rule of one name": (
        lambda w: rule("add")(lambda x: x),
        ValueError,
        "there is a rule 'add' already; choose another name",
    ),
    "a matrix by a number": (
        lambda w: zeros(w, 4, at=Shard(0)) @ zeros(w, at=Replicate()),
        ValueError,
        r"matmul needs vectors or matrices, got shapes \(4,\) and \(\)",
    ),
}
