"""What a program may do between and within steps, in any order: several models, other orders of units."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import loss_of, make_mesh
from turns import NUM_UNITS, Pair


# ------------------------------------------------------------------------------------------------- several models
@distributed(world_size=(2, 3))
def test_two_models_trained_in_turn_do_not_meet(world: World) -> None:
    first, second = Pair(world, 0), Pair(world, 1, reshard_after_forward=False)
    for batch in range(3):
        losses = [first.loss(batch), second.loss(batch)]
        # The one that ran first is walked back first, the other way in the next round.
        for at in (0, 1) if batch % 2 else (1, 0):
            world.platform.backward([losses[at]])
        for pair in (first, second):
            world.platform.backward([pair.reference_loss(batch)])
            pair.check()
            pair.step()
            pair.check_freed()
    first.check()
    second.check()


@distributed(world_size=2)
def test_one_loss_of_two_models_trains_both(world: World) -> None:
    first, second = Pair(world, 0), Pair(world, 1)
    for batch in range(2):
        world.platform.backward([first.loss(batch) * second.loss(batch + 7)])
        # Not the mean of products but the product of means is what ranks see alike only if all ranks see the same samples.
        total = None
        for rank in range(world.size):
            product = None
            for pair, seed in ((first, batch), (second, batch + 7)):
                output = pair.reference(pair.inputs(seed, rank), rank=tuple(range(NUM_UNITS)))
                loss = loss_of(world.platform, output)
                product = loss if product is None else product * loss
            total = product if total is None else total + product
        world.platform.backward([total / world.size])
        for pair in (first, second):
            pair.check()
            pair.step()
            pair.check_freed()


@distributed(world_size=2)
def test_two_optimizers_take_turns_on_one_model(world: World) -> None:
    pair = Pair(world)
    for batch in range(4):
        pair.backward(batch)
        # Each has half of the parameters; gradients of the other half add up until its turn.
        pair.step(lambda name, batch=batch: ("inner" in name) == (batch % 2 == 0))
        pair.check()
    pair.check_freed()


# ---------------------------------------------------------------------------------------------------- orders of units
ORDERS = [
    (0, 1, 2, 3),
    (3, 1, 0, 2),
    (3, 1, 0, 2),
    (0, 2),
    (0, 2),
    (),
    (1, 1, 3),
    (0, 1, 2, 3),
    (2,),
    (3, 2, 1, 0, 1, 2, 3),
]
"""What a step calls: all, another order, the same again, some only, none, one twice, all, one, all there and back."""


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
@distributed(world_size=(2, 4))
def test_units_may_run_in_another_order_in_every_step(world: World, options: dict[str, Any]) -> None:
    pair = Pair(world, **options)
    for batch, order in enumerate(ORDERS):
        with count_collectives() as counted:
            loss = pair.loss(batch, order)
            world.platform.backward([loss])
        uses = sorted(set(order))
        # A wrong guess of who comes next costs a gather of its own, and one that is guessed right costs none more.
        at_least = (1 if options else 2) * len(uses) + 1
        assert at_least <= counted.counts["all_gather"] <= at_least + 2 + len(order)
        assert counted.counts["reduce_scatter"] == len(uses) + 1
        world.platform.backward([pair.reference_loss(batch, order)])
        pair.check()
        pair.step()
        pair.check_freed()


@distributed(world_size=2)
def test_looking_ahead_costs_nothing_while_the_order_stays_and_one_gather_where_it_changes(
    world: World,
) -> None:
    pair = Pair(world)
    gathers = []
    for batch, order in enumerate([(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3), (0, 1), (0, 1)]):
        with count_collectives() as counted:
            world.platform.backward([pair.loss(batch, order)])
        gathers.append(counted.counts["all_gather"])
        pair.drop_gradients()
    # Twice for each unit and once for the root. Where the order changes, the unit that was expected in forward is gathered for
    # nothing if it does not run later; here 1 was, and serves. In backward the order is known from forward.
    assert gathers[:2] == [9, 9]
    assert gathers[3] == 9
    assert gathers[5] == 5
    assert all(9 <= n <= 11 for n in gathers[2:3])
    assert 5 <= gathers[4] <= 7


# ------------------------------------------------------------------------------------------- put off, and then left out
@distributed(world_size=4, backends="torch")
def test_a_unit_that_does_not_run_in_the_last_micro_batch_is_reduced_among_replicas(world: World) -> None:
    pair = Pair(world, mesh=make_mesh(world, replicas=2))
    orders = [(0, 1, 2, 3), (0, 2), (2,)]
    with count_collectives() as counted:
        for batch, order in enumerate(orders):
            pair.model.set_requires_all_reduce(batch == 2)
            world.platform.backward([pair.loss(batch, order)])
    # The last backward reduces the three that wait as well.
    assert counted.counts["reduce_scatter"] == (5 + 3 + 2) + 3
    assert counted.counts["all_reduce"] == 5
    for batch, order in enumerate(orders):
        world.platform.backward([pair.reference_loss(batch, order)])
    pair.check()
    pair.check_freed()
