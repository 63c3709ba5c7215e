"""DTensors under torch's contexts and tools: autocast, anomaly detection, the profiler, counting of operations, threads."""

import copy
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hp_dtensor import DTensor, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, S1, TOLERANCE, TORCH, R, cut, make_mesh, whole_of


def _mlp(x: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, up)), down)


@distributed((2, 3), backends=TORCH)
def test_autocast_is_that_of_the_local_tensors_with_the_same_plans(world: World) -> None:
    # Rows cut: no sum goes over ranks, so that bfloat16 rounds as in one process.
    x, up, down = (whole_of(world, *shape).float() for shape in ((7, 4), (6, 4), (4, 6)))
    placed = [
        distribute_tensor(t, make_mesh(world), [at]).requires_grad_()
        for t, at in ((x, S0), (up, R), (down, R))
    ]
    plain = [t.clone().requires_grad_() for t in (x, up, down)]
    _mlp(*placed)
    known = len(placed[0]._spec.plans)
    with torch.autocast(world.device_type, torch.bfloat16):
        y, expected = _mlp(*placed), _mlp(*plain)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert len(placed[0]._spec.plans) == known  # dtypes are in no key
    assert_parity(y.float(), expected.float(), rtol=1e-2, atol=1e-2)
    (y.float() ** 2).sum().backward()
    (expected.float() ** 2).sum().backward()
    for mine, t in zip(placed, plain, strict=True):
        assert mine.grad.dtype == torch.float32
        # Gradients of bfloat16 products (8 bits), summed over ranks in float32.
        assert_parity(mine.grad, t.grad, rtol=5e-2, atol=5e-2 * float(t.grad.abs().max()))


@distributed(2, backends=TORCH)
def test_anomalies_are_found_behind_dtensors(world: World) -> None:
    x = cut(world, 4).abs().detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it is slow, and where the value was made
        with torch.autograd.detect_anomaly():
            (x * 2).sum().backward()
            loss = ((x * 0).sqrt() * 0).sum()
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss.backward()
    assert_parity(x.grad, torch.full_like(whole_of(world, 4), 2.0), exact=True)


@distributed(2, backends=TORCH)
def test_profiler_and_flop_counter_see_the_local_work(world: World) -> None:
    x, w = cut(world, 8, 4), cut(world, 6, 4, at=R).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        F.linear(x, w).sum().backward()
    # Of this rank's 4 rows: one product forward, one for the gradient of w.
    assert counter.get_total_flops() == 2 * (2 * 4 * 4 * 6)
    with torch.profiler.profile(acc_events=True) as profile:
        F.linear(x, w)
    assert any(event.key in ("aten::linear", "aten::mm") for event in profile.key_averages())


@distributed(2, backends=TORCH)
def test_backward_runs_in_another_thread_and_threads_share_a_leaf(world: World) -> None:
    w, x = cut(world, 6, 4, at=R).requires_grad_(), cut(world, 5, 4)
    losses = [F.linear(x, w).square().sum()]
    thread = threading.Thread(target=lambda: losses[0].backward())
    thread.start()
    thread.join()
    plain = whole_of(world, 6, 4).requires_grad_()
    F.linear(whole_of(world, 5, 4), plain).square().sum().backward()
    assert_parity(w.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE)
    # Without collectives, whose order threads would mix: each use of a shard is local.
    v, found, failed = cut(world, 8, 4).requires_grad_(), [], []

    def work(i: int) -> None:
        try:
            for _ in range(20):
                y = (v * i).exp().sin() + v
                assert isinstance(y, DTensor)
            found.append(torch.autograd.grad(y.to_local().sum(), [v.to_local()])[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed and len(found) == 4


@distributed((2, 3), backends=TORCH)
def test_a_penalty_on_gradients_trains_as_in_one_process(world: World) -> None:
    """Double backward: the loss holds the norm of the gradient with respect to the input."""
    for places in ((S0, R, R), (R, S0, S1), (R, S1, S0), (S0, S0, S1)):
        shapes = ((5, 4), (6, 4), (4, 6))
        plain = [whole_of(world, *s).requires_grad_() for s in shapes]
        placed = [cut(world, *s, at=at).requires_grad_() for s, at in zip(shapes, places, strict=True)]
        for tensors in (plain, placed):
            y = _mlp(*tensors).square().sum()
            (g,) = torch.autograd.grad(y, [tensors[0]], create_graph=True)
            (y + (g * g).sum()).backward()
        for i, (mine, t) in enumerate(zip(placed, plain, strict=True)):
            assert_parity(mine.grad, t.grad, rtol=TOLERANCE, atol=TOLERANCE, name=f"{places} {i}")


@distributed((3, 4), backends=TORCH)
def test_two_steps_of_a_model_on_three_and_four_ranks(world: World) -> None:
    """Uneven and empty pieces through forward, clipping, the optimizer, and a copy of the state."""
    shapes, places = ((5, 4), (3, 5), (2,), (2, 3)), (S0, S1, S0, S1)
    plain = [nn.Parameter(whole_of(world, *s)) for s in shapes]
    placed = [nn.Parameter(cut(world, *s, at=at)) for s, at in zip(shapes, places, strict=True)]
    x = whole_of(world, 7, 4)
    inputs = (x, distribute_tensor(x, make_mesh(world), [R]))
    norms = []
    for parameters, data in zip((plain, placed), inputs, strict=True):
        optimizer = torch.optim.AdamW(parameters, 0.05)
        for _ in range(2):
            up, down, bias, head = parameters
            y = F.linear(_mlp(data, up, down), head, bias)
            (y * y).mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
            optimizer.step()
            optimizer.zero_grad()
        copy.deepcopy(optimizer.state_dict())
    for i, (mine, p) in enumerate(zip(placed, plain, strict=True)):
        assert_parity(mine, p, rtol=TOLERANCE, atol=TOLERANCE, name=str(i))
    for mine, norm in zip(norms[2:], norms[:2], strict=True):
        assert_parity(mine, norm, rtol=TOLERANCE, atol=TOLERANCE, name="norm")
    with count_collectives() as counted:
        F.linear(inputs[1], placed[0])
    counted.assert_counts()
