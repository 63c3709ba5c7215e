"""Dropout in a tensor parallel model has the mask of one process, whatever lies where."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor, manual_seed, parallelize_module, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, DropoutParallel, Linear2DParallel, RowwiseParallel, SequenceParallel

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker, backward, local, make_mesh, mean_square, tolerance, whole_gradients

WIDTH, LENGTH, BATCH, P = 6, 12, 2, 0.4
Apply = Callable[[Any, Any, float], Any]


def drops_by_layer(layer: Any, x: Any, p: float) -> Any:
    return layer(x)


def drops_by_function(layer: Any, x: Any, p: float) -> Any:
    """One process: ``hp_dtensor.random.dropout`` of a plain tensor."""
    return random.dropout(x, p)


def stock_dropout(world: World) -> Any:
    """The framework's layer, in training mode, which not every framework begins with."""
    layer = Maker(world).stock.Dropout(P)
    world.platform.set_training(layer, True)
    return layer


def feed_forward(world: World, hidden: int, drop: Apply) -> Any:
    """Two linear layers with dropout behind each, and a residual stream."""
    platform, maker = world.platform, Maker(world)

    class FeedForward(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = maker.linear(WIDTH, hidden), maker.linear(hidden, WIDTH)
            self.inner, self.outer = stock_dropout(world), stock_dropout(world)

        def forward(self, x: Any) -> Any:
            inner = drop(self.inner, platform.silu(self.up(x)), P)
            return drop(self.outer, self.down(inner), P)

    return FeedForward()


def attention(world: World, heads: int, drop: Apply) -> Any:
    """Softmax attention written out, with dropout of the probabilities."""
    platform, maker, size = world.platform, Maker(world), 2
    width = heads * size

    class Attention(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (maker.linear(WIDTH, width) for _ in range(3))
            self.o = maker.linear(width, WIDTH)
            self.drop = stock_dropout(world)

        def forward(self, x: Any) -> Any:
            q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
            scores = platform.softmax(platform.matmul(q, platform.transpose(k, 2, 3)), -1)
            mixed = platform.transpose(platform.matmul(drop(self.drop, scores, P), v), 1, 2)
            batch, length, own, _ = mixed.shape
            return self.o(platform.reshape(mixed, (batch, length, own * size)))

        def heads(self, x: Any) -> Any:
            batch, length, own = x.shape
            return platform.transpose(platform.reshape(x, (batch, length, own // size, size)), 1, 2)

    return Attention()


def check(world: World, build: Callable[[Apply], Any], plan: dict[str, Any], name: str) -> None:
    """Two steps of forward and backward: results, gradients and where the stream stands."""
    platform = world.platform
    reference, model = build(drops_by_function), build(drops_by_layer)
    parallelize_module(model, make_mesh(world), plan)
    found, expected = [], []
    for net, seen in ((reference, expected), (model, found)):
        manual_seed(11)
        for step in range(2):
            x = platform.set_requires_grad_(Maker(world, 50 + step).tensor(BATCH, LENGTH, WIDTH), True)
            y = net(x)
            backward(platform, mean_square(platform, y))
            y = y.full_tensor() if hasattr(y, "full_tensor") else y
            seen.append((platform.detach(y), platform.get_grad(x)))
        seen.append(whole_gradients(platform, net))
        seen.append(random.get_state())
    assert_parity(found, expected, **tolerance(world), name=name)


LOCAL = "plain pieces"
DTENSORS = "DTensors"
SEQUENCE = "a cut sequence"


@pytest.mark.parametrize("way", [LOCAL, DTENSORS, SEQUENCE])
@distributed(world_size=[1, 2, 3, 4])
def test_dropout_behind_both_layers_of_a_pair_has_the_mask_of_one_process(world: World, way: str) -> None:
    for hidden in (12, 7, 2):  # even, uneven, fewer features than ranks
        # Sizes are told for some, asked for others.
        told = {"sizes": {-1: hidden}} if hidden != 7 else {}
        plans: dict[str, dict[str, Any]] = {
            LOCAL: {
                "up": ColwiseParallel(),
                "inner": DropoutParallel(input_layouts=Shard(-1), **told),
                "down": RowwiseParallel(),
                "outer": DropoutParallel(),
            },
            DTENSORS: {
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(use_local_output=False),
            },
            SEQUENCE: {
                "up": ColwiseParallel(),
                "inner": DropoutParallel(input_layouts=Shard(-1), **told),
                "down": RowwiseParallel(output_layouts=Shard(1)),
                "outer": SequenceParallel(),
            },
        }
        check(world, lambda drop: feed_forward(world, hidden, drop), plans[way], f"{way}, hidden {hidden}")  # noqa: B023


@pytest.mark.parametrize("way", [LOCAL, DTENSORS])
@distributed(world_size=[1, 2, 3])
def test_dropout_of_attention_probabilities_has_the_mask_of_one_process(world: World, way: str) -> None:
    heads = 6
    is_local = way == LOCAL
    plan: dict[str, Any] = {
        "[qkv]": ColwiseParallel(heads=heads, use_local_output=is_local),
        "o": RowwiseParallel(heads=heads),
    }
    if is_local:
        plan["drop"] = DropoutParallel(input_layouts=Shard(1), sizes={1: heads})
    check(world, lambda drop: attention(world, heads, drop), plan, way)


@distributed(world_size=2)
def test_without_a_style_plain_pieces_would_get_one_mask_for_all(world: World) -> None:
    """What the style is for: a layer that is told nothing takes the piece for the whole."""
    mesh, maker = make_mesh(world), Maker(world)
    whole = maker.tensor(4, 8) * 0.0 + 1.0
    piece = distribute_tensor(whole, mesh, [Shard(1)]).to_local()
    layer = parallelize_module(stock_dropout(world), mesh, DropoutParallel(input_layouts=Shard(1)))
    manual_seed(3)
    expected = random.dropout(whole, P)
    manual_seed(3)
    found = layer(piece)
    assert_parity(found, distribute_tensor(expected, mesh, [Shard(1)]).to_local(), exact=True)
    manual_seed(3)
    alone = parallelize_module(stock_dropout(world), mesh, DropoutParallel())(piece)
    first = distribute_tensor(expected, mesh, [Shard(1)]).full_tensor()
    manual_seed(3)
    assert_parity(alone, random.dropout(piece, P), exact=True)
    assert world.platform.to_numpy(first).sum() != 2 * world.platform.to_numpy(alone).sum()


@distributed(world_size=[2, 4])
def test_dropout_between_layers_over_two_mesh_dims(world: World) -> None:
    platform, hidden, rows = world.platform, 7, 5
    mesh = init_device_mesh(world.device_type, (2, world.size // 2), mesh_dim_names=("tp_r", "tp_c"))
    cut = (Shard(0), Shard(1))
    x = Maker(world, 50).tensor(rows, WIDTH)
    reference, model = (
        feed_forward(world, hidden, drops_by_function),
        feed_forward(world, hidden, drops_by_layer),
    )
    told = {0: rows, 1: hidden}
    parallelize_module(
        model,
        mesh,
        {
            "up": Linear2DParallel(),
            "inner": DropoutParallel(input_layouts=cut, sizes=told),
            "down": Linear2DParallel(use_local_output=False),
        },
    )
    manual_seed(11)
    expected = reference(x)
    backward(platform, mean_square(platform, expected))
    manual_seed(11)
    found = model(distribute_tensor(x, mesh, cut).to_local())
    backward(platform, mean_square(platform, found))
    assert_parity(platform.detach(found.full_tensor()), platform.detach(expected), **tolerance(world))
    assert_parity(whole_gradients(platform, model), whole_gradients(platform, reference), **tolerance(world))


@distributed(world_size=2)
def test_told_sizes_cost_no_communication_and_others_one_gather_of_integers(world: World) -> None:
    platform, mesh, maker = world.platform, make_mesh(world), Maker(world)
    piece = distribute_tensor(maker.tensor(3, 5), mesh, [Shard(1)]).to_local()
    for style, gathers in (
        (DropoutParallel(input_layouts=Shard(-1), sizes={-1: 5}), 0),
        (DropoutParallel(), 0),
        (DropoutParallel(input_layouts=Shard(-1)), 1),
    ):
        layer = parallelize_module(stock_dropout(world), mesh, style)
        own = platform.set_requires_grad_(platform.clone(piece), True)
        with count_collectives() as counted:
            backward(platform, mean_square(platform, layer(own)))
        counted.assert_counts(all_gather=gathers)
        assert counted.nbytes() == gathers * world.size * 2 * 8  # two dims as int64 from each rank


@distributed(world_size=2)
def test_mode_and_probability_are_read_at_the_call_and_results_may_be_sharded(world: World) -> None:
    platform, mesh, maker = world.platform, make_mesh(world), Maker(world)
    x = maker.tensor(4, 6)
    piece = distribute_tensor(x, mesh, [Shard(0)]).to_local()
    style = DropoutParallel(input_layouts=Shard(0), sizes={0: 4}, use_local_output=False)
    layer = parallelize_module(stock_dropout(world), mesh, style)
    layer.p = 0.9
    manual_seed(3)
    expected = random.dropout(x, 0.9)
    manual_seed(3)
    found = layer(piece)
    assert found.placements == (Shard(0),)
    assert_parity(found.full_tensor(), expected, exact=True)
    assert layer(found).placements == (Shard(0),)  # a DTensor knows itself how it lies
    platform.set_training(layer, False)
    before = random.get_state()
    assert_parity(layer(piece).full_tensor(), x, exact=True)
    assert random.get_state() == before


@distributed(world_size=2, backends=("torch", "cuda"))
def test_on_torch_every_kind_of_dropout_and_one_process_with_global_draws(world: World) -> None:
    import torch

    mesh, x = make_mesh(world), Maker(world).tensor(4, 6, 5)
    piece = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    nn = torch.nn
    makers: list[Callable[[], Any]] = [
        nn.Dropout,
        nn.Dropout1d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
        nn.RReLU,
        lambda: nn.Dropout(inplace=True),
        lambda: nn.Dropout(0.0),
        lambda: nn.Dropout(1.0),
    ]
    for i, make in enumerate(makers):
        manual_seed(3)
        with random.global_draws():
            expected = make()(x.clone())
            after = random.get_state()
        layer = parallelize_module(make(), mesh, DropoutParallel(input_layouts=Shard(1)))
        manual_seed(3)
        found = layer(piece.clone())
        whole = distribute_tensor(expected, mesh, [Shard(1)]).to_local()
        # RReLU and the alpha dropouts compute more than they draw: last digits.
        assert_parity(found, whole, rtol=1e-14, atol=1e-14, name=f"{i}: {layer}")
        assert random.get_state() == after, layer


@distributed(world_size=[1, 2, 3, 4], backends=("torch", "cuda"))
def test_fused_attention_drops_the_probabilities_of_one_process(world: World) -> None:
    import torch

    maker, mesh = Maker(world), make_mesh(world)
    attention = torch.nn.functional.scaled_dot_product_attention
    seen = maker.tensor(5, 7) > -0.2
    seen[3] = False  # a query that sees nothing
    bias = maker.tensor(6, 5, 7)
    cases: list[tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = [
        # heads of q and k, lengths of q and k, options
        ((6, 6), (5, 7), {}),
        ((6, 6), (5, 5), {"is_causal": True}),
        ((6, 2), (5, 7), {"enable_gqa": True}),
        ((6, 3), (6, 6), {"enable_gqa": True, "is_causal": True}),
        ((6, 6), (5, 7), {"attn_mask": seen, "scale": 0.3}),
        ((6, 2), (5, 7), {"attn_mask": bias, "enable_gqa": True}),
        ((2, 2), (2, 2), {}),
    ]
    for (heads, kv_heads), (length, keys), options in cases:
        whole = [maker.tensor(3, n, l, 4) for n, l in ((heads, length), (kv_heads, keys), (kv_heads, keys))]
        plain = [x.clone().requires_grad_() for x in whole]
        manual_seed(3)
        with random.global_draws():
            expected = attention(*plain, dropout_p=P, **options)
            kept = attention(*whole, dropout_p=1e-14, **options)  # so little that nothing is dropped
        assert_parity(
            kept, attention(*whole, **options), **tolerance(world), name=f"{list(options)} of torch"
        )
        (expected * expected).sum().backward()
        for cut in (Replicate(), Shard(0), Shard(1), Shard(2)):
            own = cut if not isinstance(cut, Shard) or cut.dim < 2 else Replicate()
            placed = [distribute_tensor(x, mesh, [p]) for x, p in zip(whole, (cut, own, own), strict=True)]
            placed = [x.requires_grad_() for x in placed]
            manual_seed(3)
            found = attention(*placed, dropout_p=P, **options)
            assert random.get_state()["number"] == 1
            (found * found).sum().backward()
            assert_parity(
                [found.full_tensor().detach(), *(x.grad.full_tensor() for x in placed)],
                [expected.detach(), *(x.grad for x in plain)],
                **tolerance(world),
                name=f"{heads} and {kv_heads} heads, {list(options)}, {cut}",
            )


@distributed(world_size=2, backends=("torch", "cuda"))
def test_a_forward_that_is_recomputed_draws_the_same_masks_again(world: World) -> None:
    from torch.utils.checkpoint import checkpoint

    hidden, mesh = 7, make_mesh(world)
    plan = {
        "up": ColwiseParallel(),
        "inner": DropoutParallel(input_layouts=Shard(-1), sizes={-1: hidden}),
        "down": RowwiseParallel(),
        "outer": DropoutParallel(),
    }
    seen = []
    for recomputed in (False, True):
        model = parallelize_module(feed_forward(world, hidden, drops_by_layer), mesh, plan)
        x = Maker(world, 50).tensor(BATCH, LENGTH, WIDTH).requires_grad_()
        manual_seed(11)
        if recomputed:
            y = checkpoint(model, x, use_reentrant=False, context_fn=random.checkpoint_contexts)
        else:
            y = model(x)
        y.square().mean().backward()
        seen.append((y.detach(), x.grad, whole_gradients(world.platform, model), random.get_state()))
    assert_parity(seen[1], seen[0], exact=True)
    manual_seed(11)
    y = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(
        RuntimeError, match=r"would draw other ones .*context_fn=hp_dtensor.random.checkpoint_contexts"
    ):
        y.square().mean().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_layouts": "tp"},
            "input_layouts must be a placement such as Shard\\(-1\\), or one per mesh dim, got 'tp'",
        ),
        ({"input_layouts": ()}, "input_layouts must be a placement"),
        (
            {"input_layouts": Shard(1), "sizes": [5]},
            r"sizes maps dims that are cut to their whole sizes, .* got \[5\]",
        ),
        ({"input_layouts": Shard(1), "sizes": {1: 2.0}}, "sizes maps dims that are cut"),
        ({"input_layouts": Shard(1), "sizes": {-1: 5}}, "sizes names dim -1, but input_layouts cuts 1"),
        ({"sizes": {1: 5}}, "sizes names dim 1, but input_layouts cuts none"),
        ({"use_local_output": 1}, "use_local_output must be True or False, got 1"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DropoutParallel(**arguments)


@distributed(world_size=2)
def test_modules_meshes_and_inputs_that_do_not_fit_are_refused(world: World) -> None:
    mesh, maker = make_mesh(world), Maker(world)
    with pytest.raises(
        ValueError, match="takes a layer without parameters, .* has weight, bias: name the dropout"
    ):
        parallelize_module(maker.linear(2, 3), mesh, DropoutParallel())
    with pytest.raises(ValueError, match="DropoutParallel takes a dropout layer, got float"):
        DropoutParallel().apply(0.5, mesh)
    with pytest.raises(
        ValueError, match="input_layouts has 2 placements, .* has 1 dims: give one per mesh dim"
    ):
        parallelize_module(stock_dropout(world), mesh, DropoutParallel(input_layouts=(Shard(0), Replicate())))
    style = DropoutParallel(input_layouts=Shard(1), sizes={1: 6})
    layer = parallelize_module(stock_dropout(world), mesh, style)
    with pytest.raises(ValueError, match="DropoutParallel of Dropout.* takes one tensor, got list"):
        layer([1.0])
    with pytest.raises(
        ValueError,
        match=r"DropoutParallel of Dropout.*: the local tensor has shape \(2, 2\), but the piece of",
    ):
        layer(maker.tensor(2, 2))
    assert local(layer(maker.tensor(2, 3))).shape == (2, 3)
