"""What could have stayed, and what a move costs, on a platform of numpy arrays: the tools are tested without a framework."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_platform import _process
from op_table.bytes_moved import answer
from op_table.calls import Call, Sketch
from op_table.could_stay import could_stay

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
X, Y = Sketch((5, 3)), Sketch((3, 2))


class NumpyPlatform:
    """As much of a platform as these measures take."""

    def tensor(self, data: Any, dtype: str) -> np.ndarray:
        return np.asarray(data, dtype)

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        return x

    def narrow(self, x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
        return np.take(x, range(start, start + length), dim)

    def supports(self, _: str) -> bool:
        return False

    detach = clone = to_numpy


@pytest.fixture(autouse=True)
def _platform_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process.state, "platform", NumpyPlatform())


def refuses_pieces(x: np.ndarray) -> np.ndarray:
    if len(x) < 5:
        raise ValueError("too few rows")
    return x


CAN: list[tuple[str, str, Callable[..., Any], list[Sketch], list[Placement]]] = [
    ("rows of an elementwise operation", "pointwise", np.tanh, [X], [S0]),
    ("a sum over a cut dim", "sum", lambda x: x.sum(0), [X], [S0]),
    ("a sum of sums", "sum", lambda x: x.sum(0), [X], [P]),
    ("summands of a product", "matmul", np.matmul, [X, Y], [S1, S0]),
    ("two results", "var_mean", lambda x: (x.var(1), x.mean(1)), [X], [S0]),
]
CANNOT: list[tuple[str, str, Callable[..., Any], list[Sketch], list[Placement]]] = [
    ("a nonlinear operation of a sum", "pointwise", np.tanh, [X], [P]),
    ("summands of one factor only", "matmul", np.matmul, [X, Y], [S1, R]),
    ("numbers beside their order", "sort", lambda x: np.sort(x, 0), [X], [S0]),
    ("results that no values change", "pointwise", np.zeros_like, [X], [S0]),
    ("one result that is whole beside one that is not", "var_mean", lambda x: (x.sum(0), 1.0), [X], [S0]),
    ("a call that takes no pieces", "pointwise", refuses_pieces, [X], [S0]),
    ("what is written into a whole tensor", "copy_", lambda x, y: y, [X, X], [R, S0]),
]


@pytest.mark.parametrize(("name", "rule", "function", "tensors", "placements"), CAN)
def test_can_stay(
    name: str,
    rule: str,
    function: Callable[..., Any],
    tensors: list[Sketch],
    placements: list[Placement],
) -> None:
    assert could_stay(Call(rule, function, tensors), tensors, placements)


@pytest.mark.parametrize(("name", "rule", "function", "tensors", "placements"), CANNOT)
def test_cannot_stay(
    name: str,
    rule: str,
    function: Callable[..., Any],
    tensors: list[Sketch],
    placements: list[Placement],
) -> None:
    assert not could_stay(Call(rule, function, tensors), tensors, placements)


@pytest.mark.parametrize(("placement", "result", "share"), [(S0, S0, 0), (S1, S1, 0), (R, R, 0), (P, R, 1)])
def test_reducing_a_sum_over_two_ranks_sends_the_whole_once(
    placement: Placement, result: Placement, share: float
) -> None:
    found = answer(Call("pointwise", np.tanh, [X]), [placement], [np.ones((5, 3))])
    assert (found.results, found.share) == ((result,), share)


def test_gathering_over_two_ranks_sends_half_of_the_whole() -> None:
    found = answer(Call("sort", lambda x, **_: np.sort(x, 0), [X, 0]), [S0], [np.ones((5, 3))])
    assert (set(found.results), found.share) == ({R}, 0.5)


def test_the_share_is_of_the_bytes_of_all_tensors() -> None:
    found = answer(Call("pointwise", np.add, [X, X]), [P, R], [np.ones((5, 3))] * 2)
    assert (found.results, found.share) == ((R,), 0.5)
