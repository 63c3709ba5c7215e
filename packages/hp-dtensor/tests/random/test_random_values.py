"""Random values are those of the unsharded tensor, to the bit, whatever the placements, ranks, device and framework."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, random
from hp_dtensor.placements import Placement
from hp_dtensor.rule_checker import CheckerMesh, assembled
from hp_dtensor.rules import RULES
from hp_dtensor.spec import make_spec
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
SHAPES = [(5, 3), (8, 8), (1, 7), (2, 1), (3,), (0, 4)]

# Name of the rule -> arguments, and the same by hp_dtensor.random on a plain tensor.
WRITING: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any]]] = {
    "uniform_": ((-1.0, 3.0), lambda x: random.uniform_(x, -1.0, 3.0)),
    "normal_": ((0.5, 2.0), lambda x: random.normal_(x, 0.5, 2.0)),
    "exponential_": ((2.0,), lambda x: random.exponential_(x, 2.0)),
    "bernoulli_": ((0.25,), lambda x: random.bernoulli_(x, 0.25)),
    "random_": ((3, 9), lambda x: random.random_(x, 3, 9)),
    "cauchy_": ((0.5, 2.0), lambda x: random.cauchy_(x, 0.5, 2.0)),
    "log_normal_": ((0.5, 2.0), lambda x: random.log_normal_(x, 0.5, 2.0)),
    "geometric_": ((0.25,), lambda x: random.geometric_(x, 0.25)),
}
MAKING: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any]]] = {
    "rand_like": ((), random.rand_like),
    "randn_like": ((), random.randn_like),
    "randint_like": ((3, 9), lambda x: random.randint_like(x, 3, 9)),
    "bernoulli": ((), random.bernoulli),
    "poisson": ((), random.poisson),
    "dropout": ((0.25, True), lambda x: random.dropout(x, 0.25)),
}


def _placements(shape: tuple[int, ...], mesh: tuple[int, ...], more: tuple[Placement, ...]) -> Any:
    return itertools.product([*map(Shard, range(len(shape))), R, *more], repeat=len(mesh))


def _whole(world: World, shape: tuple[int, ...]) -> Any:
    """Numbers from 0 to 1: they may serve as probabilities."""
    ramp = world.platform.arange(0, math.prod(shape), "float32", world.device)
    return world.platform.reshape(ramp * (1 / max(math.prod(shape), 1)), shape)


def _by_ranks(world: World, rule: str, args: Any, shape: Any, placements: Any, mesh: Any) -> Any:
    """What the rule gives, every rank computed here with a stream of its own, put together."""
    pieces, lies = {}, ()
    whole = _whole(world, shape)
    for coordinate in itertools.product(*map(range, mesh)):
        random.manual_seed(11)
        spec = make_spec(CheckerMesh(mesh, coordinate), placements, shape)
        outcome = RULES[rule].plan(spec, *args)
        lies = outcome.output
        piece = whole
        wanted = make_spec(spec.mesh, outcome.output, shape)
        for dim, (offset, size) in enumerate(zip(wanted.local_offset, wanted.local_shape, strict=True)):
            piece = world.platform.narrow(piece, dim, offset, size)
        pieces[coordinate] = outcome.run(world.platform.clone(piece), *args)
        assert random.get_state() == {"seed": 11, "number": 1}, "every rank takes one number"
    return assembled(pieces, lies, mesh)


@pytest.mark.parametrize("rule", [*WRITING, *MAKING])
@distributed(world_size=1)
def test_every_rank_draws_its_part_of_the_whole(rule: str, world: World) -> None:
    args, on_plain = {**WRITING, **MAKING}[rule]
    more = (Partial(),) if rule in ("rand_like", "randn_like", "randint_like") else ()
    for shape in SHAPES:
        random.manual_seed(11)
        expected = world.platform.to_numpy(on_plain(_whole(world, shape)))
        for mesh in MESHES:
            for placements in _placements(shape, mesh, more):
                found = _by_ranks(world, rule, args, shape, placements, mesh)
                assert found.shape == shape
                assert (found == expected).all(), f"{rule} {placements} of {shape} on {mesh}"


@distributed(world_size=1)
def test_channels_are_dropped_alike_by_all_ranks_that_share_them(world: World) -> None:
    shape = (3, 4, 5)
    whole = None
    for mesh in MESHES:
        for placements in _placements(shape, mesh, ()):
            found = _by_ranks(world, "feature_dropout", (0.5, True), shape, placements, mesh)
            whole = found if whole is None else whole
            assert (found == whole).all()
    dropped = (whole[:, :, 1:] == 0).all(2)
    assert 0 < dropped.sum() < dropped.size
    assert (dropped == (whole[:, :, 1:] == 0).any(2)).all()


# The first values of a (2, 3) tensor, seed 7, operation 0.
FLOATS = {
    "uniform_": [
        0.9545971155166626,
        0.7501521706581116,
        0.11417734622955322,
        0.08565783500671387,
        0.4069603681564331,
        0.7952840328216553,
    ],
    "normal_": [
        0.00029156741220504045,
        -0.30484697222709656,
        1.78875732421875,
        1.0678725242614746,
        0.3764035105705261,
        -1.287011742591858,
    ],
    "trunc_normal_": [
        1.5055826902389526,
        -1.1182392835617065,
        -0.22447532415390015,
        -0.8900038003921509,
        -1.9025622606277466,
        0.8191750645637512,
    ],
    "kaiming_uniform_": [
        1.2857948541641235,
        0.7075371742248535,
        -1.0912712812423706,
        -1.1719366312026978,
        -0.26315581798553467,
        0.8351893424987793,
    ],
    "xavier_normal_": [
        0.00018440342682879418,
        -0.19280216097831726,
        1.1313095092773438,
        0.6753818392753601,
        0.23805847764015198,
        -0.8139776587486267,
    ],
    "exponential_": [
        0.046465884894132614,
        0.28747913241386414,
        2.1700022220611572,
        2.4573941230773926,
        0.8990393877029419,
        0.22905594110488892,
    ],
}


@pytest.mark.parametrize("name", FLOATS)
@distributed(world_size=1)
def test_values_are_the_same_on_every_framework_and_device(name: str, world: World) -> None:
    random.manual_seed(7)
    x = getattr(random, name)(world.platform.zeros((2, 3), "float32", world.device))
    assert world.platform.to_numpy(x).reshape(-1).tolist() == FLOATS[name]


@distributed(world_size=1)
def test_whole_numbers_and_masks_are_the_same_on_every_framework_and_device(world: World) -> None:
    random.manual_seed(7)
    numbers = random.randint(0, 1000, (6,), device=world.device)
    assert world.platform.to_numpy(numbers).tolist() == [788, 762, 579, 174, 884, 983]
    ones = world.platform.full((8,), 1, "float32", world.device)
    assert world.platform.to_numpy(random.dropout(ones, 0.5)).tolist() == [
        0.0,
        0.0,
        0.0,
        0.0,
        2.0,
        2.0,
        2.0,
        0.0,
    ]


ON_DTENSORS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: random.uniform_(x, -1.0, 1.0),
    "normal_": random.normal_,
    "trunc_normal_": random.trunc_normal_,
    "exponential_": random.exponential_,
    "bernoulli_": random.bernoulli_,
    "random_": random.random_,
    "kaiming_uniform_": lambda x: random.kaiming_uniform_(x, a=math.sqrt(5)),
    "kaiming_normal_": lambda x: random.kaiming_normal_(x, mode="fan_out", nonlinearity="relu"),
    "xavier_uniform_": random.xavier_uniform_,
    "xavier_normal_": lambda x: random.xavier_normal_(x, gain=2.0),
    "rand_like": lambda x: random.rand_like(x, dtype="float64"),
    "randn_like": random.randn_like,
    "randint_like": lambda x: random.randint_like(x, 5),
    "bernoulli": lambda x: random.bernoulli(x * 0 + 0.5),
    "dropout": lambda x: random.dropout(x + 1),
}


@distributed(world_size=4)
def test_a_mesh_of_two_dims_changes_nothing(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, world.size // 2))
    whole = world.platform.zeros((5, 3), "float32", world.device)
    for call in (random.normal_, random.dropout):
        random.manual_seed(3)
        plain = world.platform.to_numpy(call(whole + 1))
        for placements in ((S0, S0), (S0, S1), (S1, R)):
            random.manual_seed(3)
            drawn = call(distribute_tensor(whole + 1, mesh, placements))
            assert (world.platform.to_numpy(drawn.full_tensor()) == plain).all(), placements


@pytest.mark.parametrize("name", ON_DTENSORS)
@distributed(world_size=(1, 2))
def test_functions_give_dtensors_the_values_of_plain_tensors(name: str, world: World) -> None:
    platform, call = world.platform, ON_DTENSORS[name]
    meshes = [(world.size,), (2, 2)] if world.size == 4 else [(world.size,)]
    for shape, mesh_shape in itertools.product([(5, 3), (1, 8)], meshes):
        mesh = init_device_mesh(world.device_type, mesh_shape)
        whole = platform.zeros(shape, "float32", world.device)
        random.manual_seed(3)
        plain = call(platform.clone(whole))
        for placements in itertools.product([S0, S1, R], repeat=len(mesh_shape)):
            x = distribute_tensor(whole, mesh, placements)
            random.manual_seed(3)
            with count_collectives() as counted:
                drawn = call(x)
            counted.assert_counts()
            assert isinstance(drawn, DTensor)
            assert drawn.placements == placements
            assert drawn.dtype == plain.dtype
            full = platform.to_numpy(drawn.full_tensor())
            assert (full == platform.to_numpy(plain)).all(), f"{placements} on {mesh_shape}"


@distributed(world_size=1)
def test_a_whole_model_of_draws_is_one_sequence_and_goes_on_from_a_saved_state(world: World) -> None:
    def draw() -> list[Any]:
        x = random.rand(2, 3, device=world.device)
        return [world.platform.to_numpy(y).tolist() for y in (x, random.randn((2, 3), device=world.device))]

    random.manual_seed(1)
    first, state, second = draw(), random.get_state(), draw()
    assert first != second
    random.set_state(state)
    assert draw() == second
    own = random.RandomStream(1)
    x = random.rand(2, 3, device=world.device, generator=own)
    assert world.platform.to_numpy(x).tolist() == first[0]
    assert own.get_state() == {"seed": 1, "number": 1}
    assert random.get_state()["number"] == 4


@distributed(world_size=1)
def test_half_precision_is_the_rounded_float32_draw(world: World) -> None:
    platform = world.platform
    for dtype in ("float16", "bfloat16"):
        random.manual_seed(1)
        half = random.randn(50, dtype=dtype, device=world.device)
        random.manual_seed(1)
        single = random.randn(50, dtype="float32", device=world.device)
        assert platform.dtype_name(half.dtype) == dtype
        assert (platform.to_numpy(half) == platform.to_numpy(platform.cast(single, dtype))).all()


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "generator of the framework": (lambda x: random.rand(2, generator=object()), ValueError, "RandomStream"),
    "seed": (lambda x: random.manual_seed(1.5), ValueError, "is an int"),
    "state": (lambda x: random.set_state({"seed": 1}), ValueError, "get_state"),
    "no tensor": (lambda x: random.normal_([1.0]), ValueError, "got list"),
    "size": (lambda x: random.rand("2"), ValueError, "whole numbers"),
    "negative size": (lambda x: random.rand(2, -1), ValueError, "whole numbers"),
    "integer normal": (lambda x: random.randn(2, dtype="int64"), ValueError, "randint"),
    "negative std": (lambda x: random.normal_(x, 0.0, -1.0), ValueError, "std 0 or more"),
    "interval": (lambda x: random.uniform_(x, 1.0, 0.0), ValueError, "low <= high"),
    "rate": (lambda x: random.exponential_(x, 0.0), ValueError, "above 0"),
    "probability": (lambda x: random.dropout(x, 1.5), ValueError, "between 0 and 1"),
    "no whole numbers": (lambda x: random.randint(3, 3, (2,)), ValueError, "low < high"),
    "fan of a vector": (lambda x: random.xavier_normal_(x[0]), ValueError, "at least 2 dims"),
    "mode": (lambda x: random.kaiming_normal_(x, mode="fan"), ValueError, "fan_in"),
    "nonlinearity": (lambda x: random.kaiming_normal_(x, nonlinearity="gelu"), ValueError, "leaky_relu"),
    "bounds": (lambda x: random.trunc_normal_(x, a=2.0, b=1.0), ValueError, "low < high"),
}


@pytest.mark.parametrize("case", WRONG)
@distributed(world_size=1)
def test_wrong_calls_say_what_to_change(case: str, world: World) -> None:
    call, kind, message = WRONG[case]
    number = random.get_state()
    with pytest.raises(kind, match=message):
        call(world.platform.zeros((2, 3), "float32", world.device))
    if case != "seed":
        assert random.get_state() == number, "a refused call takes no number"


@distributed(world_size=2)
def test_a_sum_is_not_written(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = world.platform.zeros((4, 3), "float32", world.device)
    x = distribute_tensor(whole, mesh, [Partial()])
    for call in (random.normal_, random.uniform_, random.bernoulli_, random.bernoulli):
        with pytest.raises(ValueError, match="summands"):
            call(x)


@distributed(world_size=1)
def test_a_mesh_that_this_rank_is_in_may_be_seeded(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    assert random.manual_seed(9, mesh) is random.default_random_stream()
    assert random.get_state() == {"seed": 9, "number": 0}
