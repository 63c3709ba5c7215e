"""Every rule that takes whole numbers, with Partials of int64 among its tensors: the values of the unsharded operation.

Those are the cases of the other tests with whole numbers in the place of floats, where torch has a kernel for them.
"""

import importlib
import math
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard
from hp_dtensor.rule_checker import RefusedError, RuleChecker
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from rule_cases import MESHES, Case, Cases, T, combinations, tensors_of
from rule_cases import numbers as numbers_of

MODULES = ["test_rules", *(path.stem for path in sorted(Path(__file__).parent.glob("test_rules_of_*.py")))]
SAMPLES = 8
"""Combinations per case and mesh."""
# What is divided, or transformed, is of float32 then: its roundings, of numbers below 100.
TOLERANCE = 1e-4
LARGER = {"poisson_nll_loss"}
"""Exponentials, whose float32 has larger roundings."""
TIES = {"topk"}
"""Of equal values any one is taken."""


@pytest.mark.parametrize("name", MODULES)
@distributed(world_size=1, backends="torch")
def test_partials_of_whole_numbers_give_the_values_of_the_whole(name: str, world: World) -> None:
    module = importlib.import_module(name)
    tried: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"index_reduce\(\) is in beta", UserWarning)
        for given in _cases(module).values():
            for mesh in MESHES if given.rule not in LARGER | TIES else ():
                tried[given.rule] += _tried(given, mesh)
    assert len(+tried) > 2, tried


def _cases(module: Any) -> Cases:
    if hasattr(module, "OPERATIONS"):  # those of both frameworks take the platform
        both = {**module.OPERATIONS, **module.CHANGES}
        return {name: replace(one, function=one.function(get_platform())) for name, one in both.items()}
    cases: Cases = module.CASES
    return cases


def _tried(given: Case, mesh: tuple[int, ...]) -> int:
    """How many combinations of placements were tried; none where torch takes no whole numbers."""
    args = _as_whole_numbers(given.args)
    tensors = list(tensors_of(args))
    made = iter(
        _numbers(x, i) if own.dtype == "float64" else numbers_of(x, i)
        for i, (x, own) in enumerate(zip(tensors, tensors_of(given.args), strict=True))
    )
    try:
        checker = RuleChecker(
            given.rule,
            given.function,
            _with(args, made),
            mesh,
            kwargs=given.kwargs,
            tolerance=TOLERANCE,
        )
    except (RuntimeError, ValueError, TypeError, IndexError):
        return 0
    count = 0
    for placements in combinations(tensors, mesh, None, SAMPLES):
        sums = [
            any(p.is_partial() for p in lies) and x.dtype == "int64"
            for x, lies in zip(tensors, placements, strict=True)
        ]
        if not any(sums):
            continue
        count += 1
        try:
            checker.check(placements)
        except RefusedError:
            continue
        except ValueError as error:
            if "a mean of int64 is rounded" not in str(error):
                raise
    return count


def _as_whole_numbers(args: Any) -> Any:
    if isinstance(args, (list, tuple)):
        return type(args)(map(_as_whole_numbers, args))
    return T(args.shape, "int64", 0, 8) if isinstance(args, T) and args.dtype == "float64" else args


def _numbers(x: T, start: int) -> torch.Tensor:
    """From -4 to 9, without 0: sums of quotients by it are no quotients of sums."""
    values = [(i * 7 + start * 3 + 1) % 31 % 13 - 4 or 9 for i in range(math.prod(x.shape))]
    return torch.tensor(values, dtype=torch.int64).reshape(x.shape)


def _with(args: Sequence[Any], made: Any) -> list[Any]:
    def filled(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(map(filled, arg))
        return next(made) if isinstance(arg, T) else arg

    return list(map(filled, args))


@distributed([2, 3], backends=("torch", "cuda"))
def test_sums_of_whole_numbers_stay_sums_where_that_is_exact(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    large = 2**53 + 1 + world.rank  # no float64 has it
    local = torch.arange(12, device=world.device).reshape(4, 3) * (world.rank + 1) + large
    x = DTensor.from_local(local, mesh, [Partial()])
    whole = x.full_tensor()
    assert whole.dtype == torch.int64 and int(whole[0, 0]) == sum(2**53 + 1 + r for r in range(world.size))
    kept = {
        "sum": lambda x: x.sum(0),
        "running sum": lambda x: x.cumsum(1),
        "multiples": lambda x: x * -3,
        "sum of two": lambda x: x + x.flip(0),
        "product with a matrix": lambda x: x @ torch.arange(6, device=world.device).reshape(3, 2),
        "rows": lambda x: x[1:, None].expand(3, 2, 3),
        "differences": lambda x: x.diff(),
        "zeros above": lambda x: x.tril(),
    }
    for name, call in kept.items():
        with count_collectives() as counted:
            found = call(x)
        counted.assert_counts()
        assert found.placements == (Partial(),), name
        assert_parity(found, call(whole), exact=True, name=name)
    reduced = {
        "quotients": lambda x: x // 7,
        "remainders": lambda x: x % 7,
        "squares": lambda x: x * x,
        "largest": lambda x: x.amax(1),
        "shorter numbers": lambda x: x.to(torch.int32),
        "bits": lambda x: x & 255,
        "one more": lambda x: x + 1,
        "sorted": lambda x: x.sort(1).values,
        "equal": lambda x: x == x.flip(0),
        "rounded quotients": lambda x: torch.div(x, 7, rounding_mode="trunc"),
    }
    for name, call in reduced.items():
        found = call(x)
        assert found.placements == (Replicate(),), name
        assert_parity(found, call(whole), exact=True, name=name)
    for placement in (Shard(0), Shard(1)):
        y = x.redistribute(placements=[placement])
        assert_parity(y, whole, exact=True, name=f"to {placement}")
        assert_parity(
            y.redistribute(placements=[Partial()]), whole, exact=True, name=f"back from {placement}"
        )
    written = DTensor.from_local(local.clone(), mesh, [Partial()])
    expected = whole.clone()
    for y in (written, expected):
        y.mul_(5).add_(y)
        y[1] = 7
        y[:, 0] = 2
        y.neg_()
    assert_parity(written, expected, exact=True, name="written")
    with pytest.raises(ValueError, match="would write|cannot write"):
        DTensor.from_local(local.clone(), mesh, [Partial("max")]).mul_(
            DTensor.from_local(local, mesh, [Partial()]) / 2
        )
