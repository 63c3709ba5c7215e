"""What a program may do between and within steps, in any order: several models, other orders of units, failures, evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp import fully_shard, hsdp_sync_stream, parts
from hp_fsdp.unit import units_in
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, local, loss_of, make_mesh, tolerance

NUM_UNITS = 4
RATE = 0.05


def chain(maker: Maker) -> Any:
    """Blocks that are called in the order that ``rank`` says, some perhaps not, some perhaps twice; then a head."""

    def setup(module: Any) -> None:
        module.blocks = maker.platform.ModuleList([maker.block(4, 3 + at) for at in range(NUM_UNITS)])
        module.head = maker.linear(3, 4)

    def forward(module: Any, x: Any, rank: Any) -> Any:
        for at in rank:
            x = module.blocks[at](x)
        return module.head(x)

    return maker.model(setup, forward)


class Pair:
    """A model sharded, and the same in one process."""

    def __init__(self, world: World, seed: int = 0, mesh: DeviceMesh | None = None, **kwargs: Any) -> None:
        self.world, self.platform = world, world.platform
        self.reference, self.model = (chain(self._maker(seed)) for _ in range(2))
        mesh = mesh or make_mesh(world)
        for block in self.model.blocks:
            fully_shard(block, mesh, **kwargs)
        fully_shard(self.model, mesh, **kwargs)
        self.units = list(units_in(self.platform, self.model))

    def _maker(self, seed: int) -> Maker:
        maker = Maker(self.world)
        maker.random = np.random.default_rng(seed)
        return maker

    def inputs(self, batch: int, rank: int) -> Any:
        maker = Maker(self.world)
        random = np.random.default_rng(1000 * batch + rank)
        return self.platform.tensor(random.uniform(-1, 1, (2, 4)), maker.dtype, maker.device)

    def loss(self, batch: int, order: Sequence[int] = range(NUM_UNITS)) -> Any:
        """The sharded model's, of this rank's samples."""
        return loss_of(self.platform, self.model(self.inputs(batch, self.world.rank), rank=tuple(order)))

    def reference_loss(self, batch: int, order: Sequence[int] = range(NUM_UNITS)) -> Any:
        """The mean over the samples of all ranks."""
        total = None
        for rank in range(self.world.size):
            loss = loss_of(self.platform, self.reference(self.inputs(batch, rank), rank=tuple(order)))
            total = loss if total is None else total + loss
        return total / self.world.size

    def backward(self, batch: int, order: Sequence[int] = range(NUM_UNITS)) -> None:
        """Of both."""
        for loss in (self.loss(batch, order), self.reference_loss(batch, order)):
            self.platform.backward([loss])

    def step(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Stochastic gradient descent of both, on the parameters of these names; their gradients are dropped."""
        platform = self.platform
        for model in (self.reference, self.model):
            for name, parameter in platform.named_parameters(model):
                gradient = platform.get_grad(local(parameter)) if wanted(name) else None
                if gradient is not None:
                    platform.add_(local(parameter), gradient, alpha=-RATE)
                    platform.set_grad(local(parameter), None)

    def drop_gradients(self) -> None:
        self.model.zero_grad()
        for _, parameter in self.platform.named_parameters(self.reference):
            self.platform.set_grad(parameter, None)

    def check(self) -> None:
        """Parameters and gradients are those of one process."""
        platform = self.platform
        pairs = zip(
            platform.named_parameters(self.model), platform.named_parameters(self.reference), strict=True
        )
        for (name, shard), (_, whole) in pairs:
            limits = {**tolerance(self.world), "name": name}
            assert_parity(platform.detach(shard), platform.detach(whole), **limits)
            assert_parity(shard.grad, platform.get_grad(whole), **limits)

    def check_freed(self) -> None:
        """No whole parameter is in memory, and the model shows shards."""
        for unit in self.units:
            for param in unit.params:
                if not param.is_alias:
                    assert self.platform.storage_nbytes(param.full) == 0, f"{unit.label} {param.name}"
                for owner in param.owners:
                    assert getattr(owner.module, owner.attribute) is param.parameter


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


# ------------------------------------------------------------------------------------------------------------- failures
class OnPurposeError(RuntimeError):
    """Raised where a test wants a failure."""


def fail(*_: Any) -> Any:
    raise OnPurposeError("a failure")


@pytest.mark.parametrize("at", range(NUM_UNITS))
@distributed(world_size=2)
def test_training_goes_on_after_a_failure_in_the_forward_of_any_unit(world: World, at: int) -> None:
    """With the next unit's gather under way; and nothing is left behind."""
    platform = world.platform
    pair = Pair(world)
    pair.backward(0)  # from the second step on units are gathered ahead
    pair.step()
    for register in (platform.register_forward_pre_hook, platform.register_forward_hook):
        handle = register(pair.model.blocks[at], fail)
        with pytest.raises(OnPurposeError):
            pair.loss(1)
        with platform.no_grad(), pytest.raises(OnPurposeError):
            pair.loss(1)
        handle.remove()
        pair.backward(1)
        pair.check()
        pair.step()
        pair.check_freed()
    with platform.no_grad():
        assert_parity(pair.loss(2), loss_of_rank(pair, 2), **tolerance(world))
    pair.check_freed()


def loss_of_rank(pair: Pair, batch: int) -> Any:
    """The reference's, on this rank's samples."""
    output = pair.reference(pair.inputs(batch, pair.world.rank), rank=tuple(range(NUM_UNITS)))
    return loss_of(pair.platform, output)


def fail_in_forward(pair: Pair, at: int, batch: int) -> None:
    """When the unit is called."""
    handle = pair.platform.register_forward_pre_hook(pair.model.blocks[at], fail)
    with pytest.raises(OnPurposeError):
        pair.loss(batch)
    handle.remove()


def fail_in_backward(pair: Pair, at: int, batch: int) -> None:
    """When the gradient of the unit's output is known."""

    def spoil(_: Any, __: tuple, ___: dict, output: Any) -> None:
        pair.platform.register_tensor_hook(output, fail)

    handle = pair.platform.register_forward_hook(pair.model.blocks[at], spoil)
    with pytest.raises(OnPurposeError):
        pair.platform.backward([pair.loss(batch)])
    handle.remove()


@pytest.mark.parametrize("at", range(NUM_UNITS))
@distributed(world_size=2)
def test_training_goes_on_after_a_failure_in_the_backward_of_any_unit(world: World, at: int) -> None:
    """With gathers ahead and reductions of later units under way."""
    pair = Pair(world)
    pair.backward(0)
    pair.step()

    fail_in_backward(pair, at, 1)
    pair.model.zero_grad()
    for batch in (2, 3):
        pair.backward(batch)
        pair.check()
        pair.step()
        pair.check_freed()


@distributed(world_size=2)
def test_a_failure_in_one_model_does_not_touch_another(world: World) -> None:
    first, second = Pair(world, 0), Pair(world, 1)
    for pair in (first, second):
        pair.backward(0)
        pair.step()
    pending = second.loss(1)
    fail_in_forward(first, 2, 1)
    world.platform.backward([pending])
    world.platform.backward([second.reference_loss(1)])
    second.check()
    second.check_freed()
    first.backward(1)
    first.check()
    first.check_freed()


# ------------------------------------------------------------------------------------------------ anything after anything
OPTIONS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "unfused": {"comm_fusion": False},
    "apart": {"comm_fusion_zero_copy": False},
    "parts": {},  # layers of the root are units of their own
}


TOLD = ["as it is", "keeps after backward", "not the last backward", "root freed"]


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("options", list(OPTIONS))
@distributed(world_size=(2, 4), backends="torch")
def test_a_random_walk_of_training_evaluation_and_dropped_losses_equals_one_process(
    world: World, options: str, told: str
) -> None:
    check_walk(world, options, told)


@pytest.mark.parametrize(("options", "told"), list(zip(OPTIONS, TOLD, strict=False)))
@distributed(world_size=2, backends=("cuda", "npu", "mindspore"))
def test_so_does_a_random_walk_elsewhere(world: World, options: str, told: str) -> None:
    check_walk(world, options, told)


def check_walk(world: World, options: str, told: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if options == "parts":
            patch.setattr(parts, "MIN_NBYTES", 1)
        walk(Pair(world, **OPTIONS[options]), told)


def walk(pair: Pair, told: str, seed: int = 5) -> None:
    platform = pair.platform
    if told == "keeps after backward":
        pair.model.set_reshard_after_backward(False)
    elif told == "not the last backward":
        pair.model.set_is_last_backward(False)
    elif told == "root freed":
        pair.model.set_reshard_after_forward(True)
    random = np.random.default_rng(seed)  # the same walk on all ranks

    def order() -> list[int]:
        usual = list(range(NUM_UNITS))
        return usual if random.random() < 0.6 else list(random.permutation(usual)[: random.integers(0, 5)])

    kinds = [
        "train",
        "accumulate",
        "evaluate",
        "drop",
        "two",
        "unshard",
        "clear",
        "step",
        "fail",
        "fail late",
    ]
    for batch in range(30):
        kind = kinds[random.integers(len(kinds))]
        if kind in ("train", "accumulate"):
            pair.model.set_requires_gradient_sync(kind == "train")
            pair.backward(batch, order())
            if kind == "accumulate":  # must be reduced before anybody looks
                pair.model.set_requires_gradient_sync(True)
                pair.backward(batch + 100, order())
        elif kind == "evaluate":
            with platform.no_grad():
                assert_parity(pair.loss(batch), loss_of_rank(pair, batch), **tolerance(pair.world))
        elif kind == "drop":
            pair.loss(batch, order())
        elif kind == "two":
            losses = [pair.loss(batch, order()), pair.loss(batch + 200)]
            platform.backward([losses[1]])
            platform.backward([pair.reference_loss(batch + 200)])
            del losses
        elif kind == "unshard":
            pair.model.blocks[1].unshard()
        elif kind == "clear":
            pair.drop_gradients()
        elif kind == "fail":
            fail_in_forward(pair, int(random.integers(NUM_UNITS)), batch)
            with platform.no_grad():  # the next forward tidies up, and gradients are as they were
                pair.loss(batch)
        elif kind == "fail late":
            fail_in_backward(pair, int(random.integers(NUM_UNITS)), batch)
            pair.drop_gradients()  # some may have come
        else:
            hsdp_sync_stream()
            pair.check()
            pair.step()
    hsdp_sync_stream()
    pair.check()
    pair.model.set_reshard_after_backward(True)
    pair.drop_gradients()
    pair.backward(1000)
    hsdp_sync_stream()
    pair.check()
    pair.check_freed()


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
