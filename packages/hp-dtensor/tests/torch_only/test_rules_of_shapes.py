"""Rules that put together, take apart and rearrange, by torch's own functions: values and gradients, in float64."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor.rules import RULES
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from resized import add_resized
from rule_cases import Cases, Part, case, check, complexes, parts, t

CASES: Cases = {}

for function in (torch.cat, torch.concat, torch.concatenate):
    case(CASES, "cat", function, [t(5, 3), t(2, 3)])
case(CASES, "cat", torch.cat, [t(5, 3), t(5, 1), t(5, 8)], -1)
case(CASES, "cat", torch.cat, [t(5, 3)], 1)
case(CASES, "cat", torch.cat, [t(0), t(2, 3), t(3, 3)], 0)
case(CASES, "stack", torch.stack, [t(5, 3), t(5, 3)])
case(CASES, "stack", torch.stack, [t(2, 1, 3), t(2, 1, 3), t(2, 1, 3)], -2)
case(CASES, "stack", torch.stack, [t(), t()])
case(CASES, "hstack", torch.hstack, [t(5), t(3)])
case(CASES, "hstack", torch.hstack, [t(5, 3), t(5, 2)])
case(CASES, "hstack", torch.hstack, [t(), t()])
case(CASES, "vstack", torch.vstack, [t(3), t(2, 3)])
case(CASES, "vstack", torch.row_stack, [t(3), t(3)])
case(CASES, "dstack", torch.dstack, [t(5), t(1, 5, 2)])
case(CASES, "dstack", torch.dstack, [t(5, 2), t(5, 2)])
case(CASES, "column_stack", torch.column_stack, [t(5), t(5, 2)])
case(CASES, "column_stack", torch.column_stack, [t(), t()])
for name in ("atleast_1d", "atleast_2d", "atleast_3d"):
    for shape in ((), (5,), (5, 3)):
        case(CASES, name, getattr(torch, name), (t(*shape),))
    case(CASES, name, getattr(torch, name), (t(5), t(2, 3)))
case(CASES, "broadcast_tensors", lambda xs: torch.broadcast_tensors(*xs), (t(5, 1), t(3), t(5, 3)))
case(CASES, "meshgrid", torch.meshgrid, (t(5), t(3)), indexing="ij")
case(CASES, "meshgrid", torch.meshgrid, (t(2), t(), t(8)), indexing="xy")

case(CASES, "split", torch.split, t(8, 3), 3)
case(CASES, "split", torch.split, t(5, 8), (2, 0, 6), -1)
case(CASES, "split", torch.split, t(5, 3), 5)
case(CASES, "split", torch.split, t(0, 3), 2)
case(CASES, "split", torch.split_with_sizes, t(5, 3), (1, 4))
case(CASES, "chunk", torch.chunk, t(5, 3), 4)
case(CASES, "chunk", torch.chunk, t(5, 3), 1)
case(CASES, "chunk", torch.chunk, t(5, 8), 2, -1)
case(CASES, "unbind", torch.unbind, t(3, 5))
case(CASES, "unbind", torch.unbind, t(2, 5, 3), -1)
case(CASES, "tensor_split", torch.tensor_split, t(8, 3), 3)
case(CASES, "tensor_split", torch.tensor_split, t(8, 5), (2, 1, -1), 1)
case(CASES, "hsplit", torch.hsplit, t(8), 2)
case(CASES, "hsplit", torch.hsplit, t(5, 8), (3,))
case(CASES, "vsplit", torch.vsplit, t(8, 5), 4)
case(CASES, "dsplit", torch.dsplit, t(2, 3, 8), (1, 2))

case(CASES, "repeat", torch.Tensor.repeat, t(5, 3), (2, 1))
case(CASES, "repeat", torch.Tensor.repeat, t(5, 3), (3, 1, 1))
case(CASES, "repeat", torch.Tensor.repeat, t(5, 1), (1, 0))
case(CASES, "tile", torch.tile, t(2, 5, 3), (2,))
case(CASES, "tile", torch.tile, t(5), (2, 1, 2))
case(CASES, "repeat_interleave", torch.repeat_interleave, t(5, 3), 2)
case(CASES, "repeat_interleave", torch.repeat_interleave, t(5, 3), 3, -1)
case(CASES, "repeat_interleave", torch.repeat_interleave, t(5, 3), 0, 0)
case(CASES, "roll", torch.roll, t(5, 3), 2)
case(CASES, "roll", torch.roll, t(5, 3), -7, 0)
case(CASES, "roll", torch.roll, t(2, 5, 3), (1, 2), (0, 2))
case(CASES, "flip", torch.flip, t(5, 3), (0,))
case(CASES, "flip", torch.flip, t(2, 5, 3), (0, -1))
case(CASES, "fliplr", torch.fliplr, t(5, 3))
case(CASES, "flipud", torch.flipud, t(5, 3))
for k in (-1, 0, 2, 3):
    case(CASES, "rot90", torch.rot90, t(5, 3, 2), k, (0, 1))
case(CASES, "rot90", torch.rot90, t(2, 5, 3), 1, (-1, 1))
case(CASES, "pad", F.pad, t(5, 3), (1, 2))
case(CASES, "pad", F.pad, t(5, 3), (0, 0, 1, 0), "constant", 2.5)
case(CASES, "pad", F.pad, t(5, 8), (-1, 3))
for mode in ("reflect", "replicate", "circular"):
    case(CASES, "pad", F.pad, t(2, 3, 5), (2, 1), mode)
    case(CASES, "pad", F.pad, t(3, 2, 5, 3), (1, 0, 2, 2), mode)
case(CASES, "unfold", torch.Tensor.unfold, t(8, 3), 0, 3, 2)
case(CASES, "unfold", torch.Tensor.unfold, t(2, 5), -1, 5, 1)

for diagonal in (-2, 0, 1):
    case(CASES, "triangle", torch.tril, t(5, 8), diagonal)
    case(CASES, "triangle", torch.triu, t(2, 8, 3), diagonal)
    case(CASES, "diagonal", torch.diagonal, t(5, 3), diagonal)
    case(CASES, "diagonal", torch.diagonal, t(5, 2, 3), diagonal, -1, 0)
    case(CASES, "matrix_diagonal", torch.linalg.diagonal, t(2, 5, 3), offset=diagonal)
    case(CASES, "diag_embed", torch.diag_embed, t(5, 3), diagonal)
    case(CASES, "diag", torch.diag, t(5), diagonal)
    case(CASES, "diag", torch.diag, t(5, 3), diagonal)
case(CASES, "matrix_diagonal", torch.linalg.diagonal, complexes(2, 5, 3), dim1=0, dim2=1)
case(CASES, "diag_embed", torch.diag_embed, t(2, 5, 3), 1, 0, 2)
case(CASES, "diagflat", torch.diagflat, t(2, 3), 1)

case(CASES, "movedim", torch.movedim, t(2, 5, 3), 0, -1)
case(CASES, "movedim", torch.movedim, t(2, 5, 3, 1), (0, 3), (2, 0))
case(CASES, "expand_as", torch.Tensor.expand_as, t(5, 1), t(2, 5, 3))
case(CASES, "ravel", torch.ravel, t(5, 3))
case(CASES, "adjoint", torch.adjoint, t(2, 5, 3))
case(CASES, "conjugated", torch.conj, t(5, 3))
case(CASES, "narrow", torch.narrow, t(5, 3), 0, 1, 3)
case(CASES, "narrow", torch.narrow, t(8, 3), 0, 0, 8)
case(CASES, "narrow", torch.narrow, t(8, 3), 0, -3, 2)
case(CASES, "narrow", torch.narrow, t(8, 3), 1, 3, 0)
case(CASES, "select", torch.select, t(5, 3), 0, 2)
case(CASES, "select", torch.select, t(2, 5, 3), -1, -1)
case(CASES, "select", torch.select, t(1, 3), 0, 0)
case(CASES, "view_as", torch.Tensor.view_as, t(4, 6), t(3, 8))
case(CASES, "view_as", torch.Tensor.reshape_as, t(5, 3), t(5, 3))

# ------------------------------------------------------------------------------- as they are, and others that lie as they do
case(CASES, "cast", torch.Tensor.to, t(5, 3), torch.float64)
case(CASES, "cast", torch.Tensor.to, t(5, 3), torch.int64)
case(CASES, "identity", torch.Tensor.double, t(5, 3))
case(CASES, "negated", torch.neg, t(5, 3))
case(CASES, "copied", torch.clone, t(5, 3))
case(CASES, "zeros_like", torch.zeros_like, t(5, 3))
case(CASES, "ones_like", torch.ones_like, t(5, 3))
case(CASES, "full_like", torch.full_like, t(5, 3), 2.5)


add_resized(CASES)


@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends=("torch", "cuda"))
def test_rule_gives_values_and_gradients_of_the_unsharded_operation(part: Part, world: World) -> None:
    check(CASES[part.name], part)


def test_every_rule_of_these_families_is_checked() -> None:
    families = {"join", "split", "rearrange", "diagonal", "slices"}
    own = {name for name, rule in RULES.items() if rule.plan.__module__.rpartition(".")[2] in families}
    assert own - {case.rule for case in CASES.values()} == set()
