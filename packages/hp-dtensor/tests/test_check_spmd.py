"""check_spmd: the first operation whose values or gradients are not what is declared is found, on all ranks, by name."""

import dis
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Partial, Replicate, Shard, ShardingPlan, check_spmd, distribute_tensor, shard_module
from hp_dtensor.rules import RULES, Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import _process, get_platform
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent / "modules"))
from layer_programs import grad_of, loss_of, make, make_mesh, placed_input, tensor

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)

COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.o", "mlp.down")

if "total_claimed_whole_test" not in RULES:

    @rule("total_claimed_whole_test", params=("input",))
    def _claimed_whole(x: Spec) -> Outcome:
        """The lie: the sum of a piece is a summand, and no whole."""
        return Outcome((x.placements,), (R,) * len(x.placements), ())

    @rule("flip_test", params=("input",))
    def _flipped(x: Spec) -> Outcome:
        """The lie: every rank reverses its own rows, but the order of the ranks stays."""
        return Outcome((x.placements,), x.placements, x.shape)

    @rule("same_test", params=("input", "rank"))
    def _same(x: Spec, rank: int) -> Outcome:
        """True, for a function that does the same on all ranks."""
        return Outcome((x.placements,), x.placements, x.shape)


@cache
def functions() -> Any:
    """The Functions, which derive from the framework's class."""
    from hp_dtensor import DFunction

    p: Any = get_platform()

    class Total(DFunction):
        _op_name = "total_claimed_whole_test"

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return p.sum(x)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            raise AssertionError("never reached")

    class Flip(DFunction):
        _op_name = "flip_test"

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return p.cat([p.narrow(x, 0, i, 1) for i in reversed(range(x.shape[0]))], 0)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            raise AssertionError("never reached")

    class Twice(DFunction):
        """Right in forward; each rank gives a gradient of its own."""

        _op_name = "same_test"

        @staticmethod
        def forward(ctx: Any, x: Any, rank: int) -> Any:
            ctx.rank = rank
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * (2 + ctx.rank), None

    class Found:
        total, flip, twice = Total.apply, Flip.apply, Twice.apply

    return Found


def _sharded_layer(world: World, *, grid: bool = False) -> tuple[Any, Any]:
    """The attention-like layer with an MLP, by columns and rows over ``tp``; and its mesh."""
    mesh = make_mesh(world, grid=grid)

    def lies(placement: Any) -> list[Any]:
        return [placement if name == "tp" else R for name in mesh.mesh_dim_names]

    plan = {
        **{f"{name}.weight": lies(S0) for name in COLUMNS},
        **{f"{name}.bias": lies(S0) for name in COLUMNS},
        **{f"{name}.weight": lies(S1) for name in ROWS},
        **{f"{name}.bias": lies(R) for name in ROWS},
    }
    return shard_module(make(world), mesh, ShardingPlan(plan)), mesh


def _operations(x: Any) -> set[Any]:
    """Of which calls of operations a plan is kept; ways to move tensors are kept as well, by other keys."""
    return {key for key in x._spec.plans if not isinstance(key[0], str)}


def _gradients(p: Any, layer: Any) -> dict[str, Any]:
    """This rank's pieces, copied: what is added to a gradient later shall not show. On one rank parameters may be plain."""
    of = {name: grad_of(p, w) for name, w in p.named_parameters(layer)}
    return {name: p.clone(g.to_local() if hasattr(g, "to_local") else g) for name, g in of.items()}


def _error(call: Any) -> str:
    with pytest.raises(RuntimeError, match="check_spmd") as caught:
        call()
    return str(caught.value)


@distributed([1, 2])
def test_a_right_training_step_passes_on_a_line(world: World) -> None:
    _check_step(world, grid=False)


@distributed(4, backends=("torch", "cuda"))
def test_a_right_training_step_passes_on_a_grid(world: World) -> None:
    _check_step(world, grid=True)


def _check_step(world: World, *, grid: bool) -> None:
    p = world.platform
    layer, mesh = _sharded_layer(world, grid=grid)
    x = placed_input(world, mesh)
    loss_of(layer(x)).backward()
    expected = _gradients(p, layer)
    plans = _operations(x)
    for _, w in p.named_parameters(layer):
        if hasattr(w, "full_tensor"):
            w.grad = None
        else:
            p.set_grad(w, None)
    with check_spmd(layer):
        loss_of(layer(x)).backward()
    found = _gradients(p, layer)
    for name, gradient in found.items():
        assert_parity(gradient, expected[name], exact=True, name=name)
    assert _operations(x) == plans


@distributed(2)
def test_values_that_differ_where_replicate_is_declared_are_found_at_their_first_use(world: World) -> None:
    from hp_dtensor import DTensor

    mesh = make_mesh(world)
    x = DTensor.from_local(tensor(world, 3, 2, seed=world.rank), mesh, [R])

    def use() -> None:
        with check_spmd():
            x + 1

    text = _error(use)
    for part in ("argument 0 of", "add", "(Replicate(),)", "mesh dim 0 ('tp')", "rank 1 holds", "from_local"):
        assert part in text, text


@distributed(4, backends=("torch", "cuda"))
def test_the_error_names_the_mesh_dim_and_comes_on_all_ranks_of_a_grid(world: World) -> None:
    from hp_dtensor import DTensor

    mesh = make_mesh(world, grid=True)
    x = DTensor.from_local(tensor(world, 3, 2, seed=int(world.rank == 3)), mesh, [S0, R])

    def use() -> None:
        with check_spmd():
            x * 2

    text = _error(use)
    assert "mesh dim 1 ('tp') rank 3 holds" in text, text


@distributed(2)
def test_a_rule_that_calls_a_summand_whole_is_found_by_the_function(world: World) -> None:
    x = distribute_tensor(tensor(world, 5, 2), make_mesh(world), [S0])

    def use() -> None:
        with check_spmd():
            functions().total(x)

    text = _error(use)
    for part in ("the result of ", "Total is declared", "(Replicate(),)", "rank 1 holds", "rule"):
        assert part in text, text


@distributed(2)
def test_a_rule_with_shards_in_the_wrong_order_is_found_by_the_function(world: World) -> None:
    x = distribute_tensor(tensor(world, 6, 2), make_mesh(world), [S0])

    def use() -> None:
        with check_spmd():
            functions().flip(x)

    text = _error(use)
    for part in ("the result of ", "Flip is declared", repr((S0,)), "ranks 0, 1"):
        assert part in text, text


@distributed(2)
def test_a_backward_that_gives_replicas_other_gradients_is_found(world: World) -> None:
    p = world.platform
    x = distribute_tensor(tensor(world, 3, 2), make_mesh(world), [R]).requires_grad_(True)

    def use() -> None:
        with check_spmd():
            loss_of(functions().twice(x * 3, world.rank)).backward()

    text = _error(use)
    for part in ("the gradient of the result of", "mul", "rank 1 holds", "backward"):
        assert part in text, text
    assert p.get_grad(x.to_local()) is None


@distributed(2)
def test_a_local_path_that_differs_between_ranks_is_found_unless_it_says_so(world: World) -> None:
    p = world.platform
    mesh = make_mesh(world)

    def step(grad_placements: Any) -> Any:
        x = distribute_tensor(tensor(world, 3, 2), mesh, [R]).requires_grad_(True)
        with check_spmd():
            y = (x * 3).to_local(grad_placements=grad_placements)
            p.backward([p.sum(y * (1 + world.rank))])
        return x.grad

    assert "to_local(grad_placements=[Partial()])" in _error(lambda: step(None))
    assert step([P]).placements == (R,)


@distributed(2)
def test_the_module_is_named_and_blocks_nest(world: World) -> None:
    p = world.platform
    layer, mesh = _sharded_layer(world)
    x = placed_input(world, mesh)
    with p.no_grad():
        bias = layer.mlp.down.bias.to_local()
        p.copy_(bias, bias + world.rank)

    def use() -> None:
        with check_spmd(), check_spmd(layer):
            layer(x)

    text = _error(use)
    assert "in module 'mlp.down' (Linear)" in text, text

    def use_outer() -> None:
        with check_spmd():
            with check_spmd(rtol=1.0, atol=10.0):
                layer(x)
            layer(x)

    assert "in module" not in _error(use_outer)


@distributed(2)
def test_nothing_is_left_behind(world: World) -> None:
    layer, mesh = _sharded_layer(world)
    x = placed_input(world, mesh)
    with count_collectives() as plain:
        loss_of(layer(x)).backward()
    with check_spmd(layer):
        loss = loss_of(layer(x))
    assert _process.open_modes.count == 0
    assert _process.spmd_watcher.get() is None
    with count_collectives() as after:
        loss.backward()
        loss_of(layer(x)).backward()
    assert "broadcast" not in after.counts  # no hook compares any more
    with count_collectives() as again:
        loss_of(layer(x)).backward()
    again.assert_counts(**plain.counts)


@distributed(2)
def test_operations_in_place_and_nan_pass(world: World) -> None:
    p, mesh = world.platform, make_mesh(world)
    with p.no_grad(), check_spmd():
        for lies in (S0, S1, R):
            x = distribute_tensor(tensor(world, 5, 2), mesh, [lies])
            y = distribute_tensor(tensor(world, 5, 2, seed=1), mesh, [R])
            x.add_(y)
            x.mul_(2.0)
            x[1:3] = 0.5
            assert tuple(x.sum(0).shape) == (2,)
            assert tuple((x / 0 * 0).shape) == (5, 2)  # NaN equals NaN


@distributed(1)
def test_outside_of_any_block_an_operation_reads_one_counter_only(world: World) -> None:
    from hp_dtensor.native import dispatch

    class Watcher:
        def run(self, *_: Any) -> Any:
            raise AssertionError("asked although no block is open")

    x = distribute_tensor(tensor(world, 3, 2), make_mesh(world), [R])
    token = _process.spmd_watcher.set(Watcher())
    try:
        assert hasattr(x + 1, "placements")
    finally:
        _process.spmd_watcher.reset(token)
    read = [i for i in dis.get_instructions(dispatch) if i.argval == "count"]
    assert len(read) == 1


def test_a_negative_tolerance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rtol is a number of at least 0.*got -1"), check_spmd(rtol=-1):
        pass
