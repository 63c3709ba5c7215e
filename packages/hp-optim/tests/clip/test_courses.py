"""What happens where gradients are missing, infinite, wide or narrow, repeated, or spread over pipeline stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_optim import clip_grad_norm_, get_grad_norm
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

WITH_FLOAT64 = ("torch", "cuda", "mindspore")


def number(world: World, x: Any) -> float:
    return float(world.platform.to_numpy(x))


def sharded(world: World, mesh: Any, values: np.ndarray, dtype: str = "float32", dim: int = 0) -> Any:
    """A parameter cut along ``dim``, and its gradient."""
    platform = world.platform

    def placed(x: np.ndarray) -> Any:
        return distribute_tensor(platform.tensor(x, dtype, world.device), mesh, [Shard(dim)])

    parameter = placed(np.ones_like(values)).requires_grad_()
    parameter.grad = placed(values)
    return parameter


def plain(world: World, values: list[float], dtype: str = "float32") -> Any:
    platform = world.platform
    tensor = platform.tensor(np.array(values), dtype, world.device)
    parameter = platform.parameter(platform.zeros_like(tensor))
    platform.set_grad(parameter, tensor)
    return parameter


def line(world: World) -> Any:
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))


@pytest.mark.parametrize("p", [0, 1, 2, np.inf, -np.inf, -1])
@distributed(world_size=(2, 3))
def test_ranks_without_a_gradient_take_part(world: World, p: float) -> None:
    """As experts that got no token, or a piece without elements. Only the first rank has some."""
    mesh = line(world)
    values = np.arange(1.0, 1.0 + 2 * world.size).reshape(world.size, 2)
    parameter = sharded(world, mesh, values)
    empty = sharded(world, mesh, np.full((1, 2), 3.0))
    if world.rank > 0:
        parameter.grad = None
        empty.grad = None
    with count_collectives() as counted:
        found = get_grad_norm([parameter, empty], p)
    counted.assert_counts(all_reduce=1)
    assert number(world, found) == pytest.approx(np.linalg.norm([1.0, 2.0, 3.0, 3.0], p), rel=1e-6)


@distributed(world_size=(1, 2))
def test_without_any_gradient_the_norm_is_that_of_nothing(world: World) -> None:
    parameter = sharded(world, line(world), np.ones((3, 2)))
    parameter.grad = None
    lone = plain(world, [1.0])
    world.platform.set_grad(lone, None)
    for p, expected in ((0, 0.0), (1, 0.0), (2, 0.0), (np.inf, 0.0), (-np.inf, np.inf)):
        assert number(world, get_grad_norm([parameter, lone], p)) == expected
        assert number(world, clip_grad_norm_([lone], 1.0, p)) == expected
        assert number(world, get_grad_norm([], p)) == expected


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@distributed(world_size=(2, 4))
def test_stages_of_a_pipeline_are_combined(world: World, p: float) -> None:
    """Half of the ranks have each stage, cut over them; the second stage has a plain parameter, too."""
    mesh = init_device_mesh(world.device_type, (2, world.size // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    values = [np.arange(6.0).reshape(3, 2) - 2.5, np.arange(4.0).reshape(1, 4) * 3]
    parameters = [sharded(world, mesh["dp"], values[stage])]
    if stage == 1:
        parameters.append(plain(world, [7.0, -2.0]))
    whole = np.concatenate([values[0].reshape(-1), values[1].reshape(-1), [7.0, -2.0]])
    expected = np.linalg.norm(whole, p)
    get_grad_norm(parameters, p, pp_group=mesh["pp"])
    with count_collectives() as counted:
        assert number(world, get_grad_norm(parameters, p, pp_group=mesh["pp"])) == pytest.approx(expected)
    counted.assert_counts(all_reduce=1 if world.size == 2 else 2)
    found = clip_grad_norm_(parameters, 0.5, p, pp_group=mesh.get_group("pp"))
    assert number(world, found) == pytest.approx(expected)
    assert number(world, get_grad_norm(parameters, p, pp_group=mesh["pp"])) == pytest.approx(0.5, rel=1e-5)


@distributed(world_size=2)
def test_a_stage_without_parameters_takes_part(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,), mesh_dim_names=("pp",))
    parameters = [plain(world, [3.0, 4.0])] if world.rank == 1 else []
    assert number(world, clip_grad_norm_(parameters, 1.0, pp_group=mesh)) == 5.0


@distributed(world_size=3, backends=("torch", "cuda"))
def test_groups_that_overlap_in_a_circle_do_not_wait_for_each_other(world: World) -> None:
    """Each rank is in two of the groups (0, 1), (1, 2), (0, 2), and gives them in an order of its own: neighbour to the right first."""
    right, left = sorted((world.rank, (world.rank + 1) % 3)), sorted((world.rank, (world.rank + 2) % 3))
    meshes = [DeviceMesh(world.device_type, ranks) for ranks in (right, left)]
    for _ in range(3):
        found = get_grad_norm([sharded(world, mesh, np.ones((2, 2))) for mesh in meshes])
        assert number(world, found) == pytest.approx(np.sqrt(8.0))


@distributed(world_size=2)
def test_main_grad_goes_before_grad(world: World) -> None:
    platform, mesh = world.platform, line(world)
    parameter = sharded(world, mesh, np.full((3, 2), 100.0), "bfloat16")
    wide = platform.tensor(np.full((3, 2), 2.0 + 2.0**-20), "float32", world.device)
    parameter.main_grad = distribute_tensor(wide, mesh, [Shard(0)])
    lone = plain(world, [100.0])
    lone.main_grad = platform.tensor(np.array([1.0]), "float32", world.device)
    expected = np.sqrt(6 * (2.0 + 2.0**-20) ** 2 + 1.0)
    found = clip_grad_norm_([parameter, lone], 1.0)
    assert number(world, found) == pytest.approx(expected, rel=1e-7)
    np.testing.assert_allclose(platform.to_numpy(lone.main_grad), [1.0 / (expected + 1e-6)], rtol=1e-6)
    np.testing.assert_array_equal(platform.to_numpy(platform.get_grad(lone)), [100.0])
    np.testing.assert_array_equal(platform.to_numpy(parameter.grad.full_tensor()), np.full((3, 2), 100.0))


@distributed(world_size=(1, 2, 3))
def test_a_plain_gradient_of_a_dtensor_lies_as_the_parameter_does(world: World) -> None:
    platform, mesh = world.platform, line(world)
    values = np.arange(10.0).reshape(5, 2)
    parameter = sharded(world, mesh, np.zeros((5, 2)))
    parameter.main_grad = platform.clone(
        distribute_tensor(platform.tensor(values, "float32", world.device), mesh, [Shard(0)]).to_local()
    )
    assert number(world, get_grad_norm([parameter])) == pytest.approx(np.linalg.norm(values), rel=1e-6)


@distributed(world_size=2)
def test_the_layout_of_the_gradient_counts_before_that_of_the_parameter(world: World) -> None:
    platform, mesh = world.platform, line(world)
    values = platform.tensor(np.arange(6.0).reshape(3, 2), "float32", world.device)
    parameter = distribute_tensor(values, mesh, [Replicate()])
    parameter.main_grad = distribute_tensor(values, mesh, [Shard(1)])
    other = distribute_tensor(values, mesh, [Shard(0)])
    other.main_grad = distribute_tensor(values, mesh, [Replicate()])
    assert number(world, get_grad_norm([parameter, other])) == pytest.approx(np.sqrt(2 * 55.0), rel=1e-6)


@distributed(world_size=2)
def test_a_partial_gradient_stays_partial_and_costs_one_reduction(world: World) -> None:
    platform, mesh = world.platform, line(world)
    parameter = distribute_tensor(platform.zeros((4, 3), "float32", world.device), mesh, [Replicate()])
    local = platform.full((4, 3), 1.0 + world.rank, "float32", world.device)
    parameter.main_grad = DTensor.from_local(local, mesh, [Partial()], shape=(4, 3))
    get_grad_norm([parameter])
    with count_collectives() as counted:
        found = clip_grad_norm_([parameter], 1.0)
    assert sum(counted.counts.values()) == 2, counted.record
    assert number(world, found) == pytest.approx(np.sqrt(12 * 9.0), rel=1e-6)
    assert parameter.main_grad.placements == (Partial(),)
    np.testing.assert_allclose(
        platform.to_numpy(parameter.main_grad.full_tensor()), np.full((4, 3), 12**-0.5), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@distributed(world_size=(1, 2))
def test_narrow_gradients_are_measured_in_float32_and_rounded_once(world: World, dtype: str) -> None:
    """The squares of 512 are beyond float16; 2049 ones are not counted in bfloat16. The factor is no number of 8 or 11 bits."""
    platform, mesh = world.platform, line(world)
    parameters = [
        sharded(world, mesh, np.full((3, 3), 512.0), dtype),
        sharded(world, mesh, np.ones((2049, 1)), dtype),
    ]
    found = clip_grad_norm_(parameters, 100.0)
    expected = np.sqrt(9 * 512.0**2 + 2049)
    assert platform.dtype_name(found.dtype) == "float32"
    assert number(world, found) == pytest.approx(expected, rel=1e-6)
    factor = np.float32(100.0 / (expected + 1e-6))
    wanted = platform.tensor(np.float32(512.0) * factor, dtype)
    got = platform.to_numpy(parameters[0].grad.full_tensor())
    np.testing.assert_array_equal(got, np.full((3, 3), platform.to_numpy(wanted)))


@distributed(world_size=(1, 2), backends=WITH_FLOAT64)
def test_mixed_dtypes_are_measured_each_in_its_own_precision(world: World) -> None:
    platform, mesh = world.platform, line(world)
    values = np.array([[1.0 + 2.0**-40], [2.0]])
    found = clip_grad_norm_([sharded(world, mesh, values, "float64"), plain(world, [2.0], "bfloat16")], 0.5)
    assert platform.dtype_name(found.dtype) == "float64"
    assert number(world, found) == pytest.approx(np.sqrt((values**2).sum() + 4.0), rel=1e-15)


@distributed(world_size=2, backends=WITH_FLOAT64)
def test_norms_whose_squares_are_beyond_float32_are_finite(world: World) -> None:
    parameters = [plain(world, [1e19]), *(plain(world, [1e19]) for _ in range(8))]
    parameters.append(sharded(world, line(world), np.full((7, 1), 1e19 / 2**0.5)))
    assert number(world, get_grad_norm(parameters)) == pytest.approx(np.sqrt(12.5) * 1e19, rel=1e-6)


@distributed(world_size=2)
def test_one_infinite_piece_is_seen_by_all_ranks(world: World) -> None:
    mesh = line(world)
    for bad in (np.inf, np.nan):
        values = np.ones((4, 1))
        values[3] = bad
        parameter = sharded(world, mesh, values)
        for function in (
            lambda p, **kw: clip_grad_norm_(p, 1.0, **kw),
            lambda p, **kw: get_grad_norm(p, **kw),
        ):
            with pytest.raises(
                RuntimeError, match=r"norm of order 2 of the gradients is (inf|nan).*skip this step"
            ):
                function([parameter], error_if_nonfinite=True)
        np.testing.assert_array_equal(world.platform.to_numpy(parameter.grad.full_tensor()), values)
        assert not np.isfinite(number(world, clip_grad_norm_([parameter], 1.0)))


@distributed(world_size=1)
def test_a_module_a_tensor_and_a_generator_are_taken_and_a_repeated_parameter_counts_once(
    world: World,
) -> None:
    platform = world.platform

    class Layer(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = plain(world, [3.0])
            self.bias = plain(world, [4.0])

        def forward(self, x: Any) -> Any:
            return x

    layer = Layer()
    parameters = [p for _, p in platform.named_parameters(layer)]
    assert number(world, get_grad_norm(layer)) == 5.0
    assert number(world, get_grad_norm(p for p in parameters)) == 5.0
    assert number(world, get_grad_norm(parameters[0])) == 3.0
    assert number(world, clip_grad_norm_([*parameters, parameters[0]], 2.5, foreach=False)) == 5.0
    np.testing.assert_allclose(platform.to_numpy(platform.get_grad(parameters[0])), [1.5], rtol=1e-6)


@distributed(world_size=1)
def test_a_generator_that_was_used_up_is_told_of(world: World) -> None:
    parameters = (p for p in [plain(world, [3.0])])
    assert number(world, get_grad_norm(parameters)) == 3.0
    with pytest.warns(UserWarning, match="get_grad_norm: the iterator gives no parameters") as told:
        assert number(world, get_grad_norm(parameters)) == 0.0
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="clip_grad_norm_: the iterator gives no parameters") as told:
        clip_grad_norm_(iter([]), 1.0)
    assert told[0].filename == __file__


@distributed(world_size=1)
def test_gradients_that_are_small_enough_do_not_change_and_a_limit_of_0_makes_them_0(world: World) -> None:
    platform = world.platform
    parameter = plain(world, [0.3, -0.4])
    before = platform.to_numpy(platform.get_grad(parameter))
    for limit in (1.0, 0.6, np.inf):
        clip_grad_norm_([parameter], limit)
        np.testing.assert_array_equal(platform.to_numpy(platform.get_grad(parameter)), before)
    clip_grad_norm_([parameter], 0)
    np.testing.assert_array_equal(platform.to_numpy(platform.get_grad(parameter)), [0.0, 0.0])


@distributed(world_size=1, backends=WITH_FLOAT64)
def test_order_0_counts_beyond_what_float32_can_count(world: World) -> None:
    """The result is float32, as the gradients are: 2^24 + 7 rounds to 2^24 + 8. Counted in float32 it would stop at 2^24."""
    platform = world.platform
    parameter = platform.parameter(platform.zeros((2**24 + 3,), "float32", world.device))
    platform.set_grad(parameter, platform.full((2**24 + 3,), 1.0, "float32", world.device))
    assert (
        number(world, get_grad_norm([parameter, *(plain(world, [1.0]) for _ in range(4))], 0)) == 2.0**24 + 8
    )
