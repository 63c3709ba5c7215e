"""torch's own random functions on DTensors, in torch.nn.init and in layers, and in one process inside of global_draws."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import init
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
R, S0, S1 = Replicate(), Shard(0), Shard(1)

IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(),
    "uniform_ of an interval": lambda x: x.uniform_(-1, to=2.0),
    "normal_": lambda x: x.normal_(),
    "normal_ of a mean": lambda x: x.normal_(1, std=0.5, generator=None),
    "exponential_": lambda x: x.exponential_(lambd=2.0),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(5),
    "random_ from to": lambda x: x.random_(2, to=5),
    "cauchy_": lambda x: x.cauchy_(),
    "cauchy_ of a median": lambda x: x.cauchy_(2.0, sigma=0.5),
    "log_normal_": lambda x: x.log_normal_(0.5, std=0.25),
    "geometric_": lambda x: x.geometric_(0.3),
    "init.uniform_": lambda x: init.uniform_(x, -2, 2),
    "init.normal_": lambda x: init.normal_(x, std=0.02),
    "init.trunc_normal_": lambda x: init.trunc_normal_(x, std=0.5, a=-0.5, b=1.0),
    "init.kaiming_uniform_": lambda x: init.kaiming_uniform_(x, a=math.sqrt(5)),
    "init.kaiming_normal_": lambda x: init.kaiming_normal_(x, mode="fan_out", nonlinearity="relu"),
    "init.xavier_uniform_": init.xavier_uniform_,
    "init.xavier_normal_": init.xavier_normal_,
}
NEW: dict[str, Callable[[Any], Any]] = {
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like low": lambda x: torch.randint_like(x, 2, 9),
    "torch.bernoulli": lambda x: torch.bernoulli(x.abs().clamp(0, 1)),
    "Tensor.bernoulli": lambda x: x.bernoulli(0.25),
    "poisson": lambda x: torch.poisson(x * 30),
    "torch.multinomial": lambda x: torch.multinomial(x, 3),
    "Tensor.multinomial": lambda x: x.multinomial(num_samples=2, replacement=False),
    "multinomial with replacement": lambda x: torch.multinomial(x, 9, replacement=True),
    "multinomial of a vector": lambda x: torch.multinomial(x.sum(0), 2),
    "normal of two tensors": lambda x: torch.normal(x, x),
    "normal of a tensor and a number": lambda x: torch.normal(x, 2.0),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x + 1, 0.25, True),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(x + 1, 0.25, True),
    "nn.AlphaDropout": lambda x: torch.nn.AlphaDropout(0.25)(x + 1),
    "nn.FeatureAlphaDropout": lambda x: torch.nn.FeatureAlphaDropout(0.5)((x + 1).unsqueeze(2)),
    "F.rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "nn.RReLU": lambda x: torch.nn.RReLU(0.1, 0.2)(x - 0.5),
    "F.dropout": lambda x: F.dropout(x + 1),
    "F.dropout in place": lambda x: F.dropout(x + 1, 0.25, True, True),
    "torch.dropout": lambda x: torch.dropout(x + 1, 0.25, True),
    "nn.Dropout": lambda x: torch.nn.Dropout(0.25)(x + 1),
    "F.dropout1d": lambda x: F.dropout1d((x + 1).unsqueeze(2)),
    "F.dropout2d": lambda x: F.dropout2d((x + 1).view(*x.shape, 1, 1)),
    "F.dropout3d": lambda x: F.dropout3d((x + 1).view(*x.shape, 1, 1, 1)),
}


@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
@distributed(world_size=2, backends=TORCH)
def test_a_dtensor_gets_what_a_plain_tensor_gets_in_one_process(name: str, world: World) -> None:
    call = {**IN_PLACE, **NEW}[name]
    for shape in ((5, 3), (1, 8)):
        whole = torch.arange(1.0, 1 + shape[0] * shape[1], device=world.device).view(shape) / 20
        random.manual_seed(4)
        with random.global_draws():
            expected = call(whole.clone())
        number = random.get_state()["number"]
        mesh = init_device_mesh(world.device_type, (2,))
        for placement in (S0, S1, R):
            x = distribute_tensor(whole, mesh, [placement])
            random.manual_seed(4)
            found = call(x)
            assert isinstance(found, DTensor)
            assert (found is x) == (name in IN_PLACE)
            assert random.get_state()["number"] == number > 0
            assert torch.equal(found.full_tensor(), expected), placement


def _program(x: Any, weight: Any) -> Any:
    hidden = F.dropout(torch.tanh(x @ weight), 0.3)
    return F.dropout(hidden @ weight, 0.6).square().sum()


@pytest.mark.parametrize("checkpointed", [False, True])
@distributed(world_size=2, backends=TORCH)
def test_gradients_behind_dropout_are_those_of_the_unsharded_program(
    checkpointed: bool, world: World
) -> None:
    def run(x: Any, weight: Any) -> Any:
        if not checkpointed:
            return _program(x, weight)
        return checkpoint(_program, x, weight, use_reentrant=False, context_fn=random.checkpoint_contexts)

    mesh = init_device_mesh(world.device_type, (2,))
    ramp = torch.arange(16.0, dtype=torch.float64, device=world.device).view(4, 4) / 8 - 1
    plain_x, plain_weight = ramp.clone().requires_grad_(), ramp.t().contiguous().requires_grad_()
    random.manual_seed(6)
    with random.global_draws():
        expected = _program(plain_x, plain_weight)
    expected.backward()
    for on_x, on_weight in itertools.product([S0, S1, R], repeat=2):
        x = distribute_tensor(ramp, mesh, [on_x]).requires_grad_()
        weight = distribute_tensor(ramp.t().contiguous(), mesh, [on_weight]).requires_grad_()
        random.manual_seed(6)
        loss = run(x, weight)
        loss.backward()
        assert random.get_state()["number"] == 2
        # Sums of 4 products, twice, in another order.
        assert_parity(loss, expected, rtol=1e-13, atol=1e-13, name="loss")
        assert_parity(x.grad, plain_x.grad, rtol=1e-12, atol=1e-12, name="x")
        assert_parity(weight.grad, plain_weight.grad, rtol=1e-12, atol=1e-12, name="weight")


@distributed(world_size=1, backends=TORCH)
def test_a_second_forward_that_would_draw_other_numbers_is_refused(world: World) -> None:
    x = torch.ones(3, device=world.device, requires_grad=True)
    y = checkpoint(lambda z: random.dropout(z.sin()).sin(), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="context_fn=hp_dtensor.random.checkpoint_contexts"):
        y.sum().backward()


@distributed(world_size=2, backends=TORCH)
def test_what_would_depend_on_the_sharding_is_refused(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(torch.zeros(4, 3, device=world.device), mesh, [S0])
    partial = distribute_tensor(torch.zeros(4, 3, device=world.device), mesh, [Partial()])
    with pytest.raises(ValueError, match="RandomStream"):
        x.normal_(generator=torch.Generator())
    with pytest.raises(ValueError, match="summands"):
        partial.normal_()
    with pytest.raises(ValueError, match="one probability"):
        x.bernoulli_(x)
    with pytest.raises(RuntimeError, match="no_grad"):
        x.requires_grad_().normal_()
    for call in (lambda: torch.binomial(x, x), lambda: F.fractional_max_pool2d(x.view(1, 1, 4, 3), 2, 2)):
        with pytest.raises(NotImplementedError, match="has no rule"):
            call()


@distributed(world_size=2, backends=TORCH)
def test_dropout_outside_of_training_keeps_a_sum_and_takes_no_number(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(torch.ones(4, 3, device=world.device), mesh, [Partial()])
    before = random.get_state()
    with count_collectives() as counted:
        for same in (F.dropout(x, training=False), torch.nn.Dropout().eval()(x)):
            assert same is x
    counted.assert_counts()
    assert random.get_state() == before


@distributed(world_size=1, backends=TORCH)
def test_torchs_makers_draw_from_the_stream_inside_of_the_block(world: World) -> None:
    before = torch.get_rng_state()
    for call, ours in (
        (lambda: torch.rand(2, 3), lambda: random.rand(2, 3)),
        (lambda: torch.rand((2, 3), dtype=torch.float64), lambda: random.rand(2, 3, dtype="float64")),
        (lambda: torch.randn(size=(4,)), lambda: random.randn(4)),
        (lambda: torch.randint(3, (5,)), lambda: random.randint(0, 3, (5,))),
        (lambda: torch.randint(3, 9, (5,)), lambda: random.randint(3, 9, (5,))),
    ):
        random.manual_seed(1)
        with random.global_draws():
            found = call()
        random.manual_seed(1)
        assert torch.equal(found, ours())
    assert torch.equal(torch.get_rng_state(), before)
    with random.global_draws(), pytest.raises(ValueError, match="out="):
        torch.rand(3, out=torch.empty(3))


@distributed(world_size=2, backends=TORCH)
def test_plans_are_made_once_whatever_the_numbers(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(torch.zeros(4, 3, device=world.device), mesh, [S0])
    x.normal_(0.0, 1.0)
    known = len(x._spec.plans)
    for std in (0.1, 0.2, 0.3):
        x.normal_(0.0, std)
    assert len(x._spec.plans) == known


@distributed(world_size=2, backends=TORCH)
def test_tensors_like_a_sum_are_replicated(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(torch.ones(4, 3, device=world.device), mesh, [Partial()])
    for make in (torch.zeros_like, torch.ones_like, torch.rand_like, lambda y: torch.full_like(y, 2.0)):
        with count_collectives() as counted:
            made = make(x)
        counted.assert_counts()
        assert made.placements == (R,)
    leaf = torch.ones_like(x, dtype=torch.float64, requires_grad=True)
    assert leaf.requires_grad
    assert leaf.dtype == torch.float64
    assert x.new_full((2, 2), 3.0).full_tensor().tolist() == [[3.0, 3.0], [3.0, 3.0]]


@distributed(world_size=2, backends=TORCH)
def test_alpha_dropout_keeps_mean_and_variance_and_its_gradient_is_that_of_the_unsharded_one(
    world: World,
) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(101, 400, generator=generator, dtype=torch.float64).to(world.device)
    random.manual_seed(3)
    with random.global_draws():
        plain = whole.clone().requires_grad_()
        expected = F.alpha_dropout(plain, 0.3, True)
    # Six standard errors of the moments of 40,000 numbers.
    assert abs(expected.mean().item()) < 0.03
    assert abs(expected.var().item() - 1) < 0.06
    expected.square().sum().backward()
    for placement in (S0, S1):
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        random.manual_seed(3)
        F.alpha_dropout(x, 0.3, True).square().sum().backward()
        assert_parity(x.grad, plain.grad, exact=True)
    assert F.alpha_dropout(x, 0.3) is x
    assert torch.equal(F.alpha_dropout(x, 1.0, True).full_tensor(), torch.zeros_like(whole))


@distributed(world_size=1, backends=TORCH)
def test_categories_come_as_often_as_their_weights_say(world: World) -> None:
    weights = torch.tensor([1.0, 0.0, 5.0, 2.0], device=world.device).expand(20_000, 4)
    random.manual_seed(8)
    with random.global_draws():
        one_by_one = torch.multinomial(weights, 3)
        again = torch.multinomial(weights[:3], 20_000, True)
    # Six standard errors of a share of 20,000 are below 0.022.
    for found in (one_by_one[:, 0], again[0], again[2]):
        share = torch.bincount(found, minlength=4) / 20_000
        assert torch.allclose(share.cpu(), torch.tensor([0.125, 0.0, 0.625, 0.25]), atol=0.022)
    # The second of those without replacement, behind the most likely one: 1 to 2.
    second = one_by_one[one_by_one[:, 0] == 2, 1]
    assert abs((second == 3).float().mean().item() - 2 / 3) < 0.03
    assert (one_by_one.sort(-1).values == torch.tensor([0, 2, 3], device=world.device)).all()


@distributed(world_size=2, backends=TORCH)
def test_wrong_calls_of_multinomial_are_named(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(torch.ones(4, 3, device=world.device), mesh, [S0])
    with pytest.raises(ValueError, match="cannot draw 4 of 3 categories without replacement"):
        torch.multinomial(x, 4)
    with pytest.raises(
        ValueError, match=r"takes weights \(rows, categories\) or \(categories,\), got shape \(1, 4, 3\)"
    ):
        x.unsqueeze(0).multinomial(1)
    with count_collectives() as counted:
        assert torch.multinomial(x, 2).placements == (S0,)
    counted.assert_counts()
