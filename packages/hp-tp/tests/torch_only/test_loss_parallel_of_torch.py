"""``loss_parallel`` on torch: second derivatives, every spelling, check_spmd, logits of three dims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import Replicate, Shard
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import loss_parallel

sys.path.insert(0, str(Path(__file__).parent.parent))
from cut_losses import Losses
from loss_oracle import Loss, check_near, numbers, targets


@distributed(2, backends=("torch", "cuda"))
def test_second_derivatives_are_those_of_one_process(world: World) -> None:
    import torch

    losses = Losses(world)
    weights = np.arange(1.0, 6)
    scores, target = torch.tensor(numbers(4, 5)), torch.tensor(targets(5, 4))
    for name in ("cross_entropy", "decomposed"):

        def loss_of(x: Any, weight: Any, name: str = name) -> Any:
            functional = losses.functional
            on = target.to(world.device)
            if name == "cross_entropy":
                return functional.cross_entropy(x, on, weight, label_smoothing=0.1)
            return functional.nll_loss(functional.log_softmax(x, -1), on, weight)

        def penalty(x: Any, weight: Any) -> Any:
            (slope,) = torch.autograd.grad(loss_of(x, weight), x, create_graph=True)
            return (slope * slope * slope).sum()

        whole = scores.clone().to(world.device).requires_grad_()
        penalty(whole, torch.tensor(weights, device=world.device)).backward()
        cut = losses.tensor(numbers(4, 5), Shard(1), requires_grad=True)
        with loss_parallel():
            penalty(cut, losses.tensor(weights, Replicate())).backward()
        check_near(cut.grad.full_tensor(), whole.grad.cpu().numpy(), name=name, atol=losses.atol)


@distributed(2, backends=("torch", "cuda"))
def test_every_spelling_of_torch_is_meant(world: World) -> None:
    import torch

    losses = Losses(world)
    scores, target = numbers(4, 5), torch.tensor(targets(5, 4), device=world.device)
    whole, cut = torch.tensor(scores, device=world.device), losses.tensor(scores, Shard(1))
    weight = torch.arange(1.0, 6, dtype=whole.dtype, device=world.device)
    spellings = {
        "method": lambda x: x.log_softmax(-1),
        "torch": lambda x: torch.log_softmax(x, dim=1),
        "special": lambda x: torch.special.log_softmax(x, -1),
        "functional": lambda x: torch.nn.functional.log_softmax(x, dim=-1),
        "module": torch.nn.LogSoftmax(dim=1),
        "dtype": lambda x: torch.log_softmax(x, 1, dtype=torch.float32),
        "keyword": lambda x: torch.nn.functional.log_softmax(input=x, dim=1, dtype=torch.float32),
        "loss module": lambda x: torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)(x, target),
        "keywords": lambda x: torch.nn.functional.cross_entropy(input=x, target=target, reduction="sum"),
        "both": lambda x: torch.nn.NLLLoss()(torch.nn.LogSoftmax(dim=-1)(x), target),
    }
    for name, spelling in spellings.items():
        expected = spelling(whole)
        with loss_parallel(), count_collectives() as counted:
            found = spelling(cut)
        assert set(counted.counts) == {"all_reduce"}, f"{name}: {counted.record}"
        assert found.dtype == expected.dtype, name
        # Scores that are cast to float32 are sums of 5 terms near 1 there.
        atol = losses.atol if found.dtype == torch.float64 else 2e-6
        check_near(found.full_tensor(), expected.cpu().double().numpy(), name=name, atol=atol)


@distributed(2, backends=("torch", "cuda"))
def test_check_spmd_finds_nothing_to_say(world: World) -> None:
    from hp_dtensor import check_spmd

    losses = Losses(world)
    loss = Loss(numbers(4, 5), targets(5, 4), np.arange(1.0, 6), "mean", 0.1)
    logits = losses.tensor(loss.scores, Shard(1), requires_grad=True)
    with check_spmd(), loss_parallel():
        losses.cross_entropy(logits, loss, losses.tensor(loss.weight, Shard(0))).backward()
    check_near(logits.grad.full_tensor(), loss.value_and_gradient()[1], name="gradient", atol=losses.atol)


@distributed(2, backends=("torch", "cuda"))
def test_a_head_may_give_logits_of_three_dims_that_are_flattened(world: World) -> None:
    losses = Losses(world)
    hidden, head = numbers(2, 3, 4, seed=7), numbers(7, 4, seed=8)
    x = losses.tensor(hidden, Replicate(), requires_grad=True)
    weight = losses.tensor(head, Shard(0), requires_grad=True)
    loss = Loss((hidden @ head.T).reshape(6, 7), targets(7, 6))
    with loss_parallel():
        logits = losses.functional.linear(x, weight)
        losses.cross_entropy(logits.view(-1, 7), loss).backward()
    gradient = loss.value_and_gradient()[1]
    check_near(weight.grad.full_tensor(), gradient.T @ hidden.reshape(6, 4), name="head", atol=losses.atol)
    check_near(x.grad.full_tensor(), (gradient @ head).reshape(2, 3, 4), name="hidden", atol=losses.atol)
