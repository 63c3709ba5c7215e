"""Dropout of torch's own layers, of its fused attention, and in a forward that is recomputed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor, manual_seed, parallelize_module, random
from hp_platform.testing import World, assert_parity, distributed
from hp_tp import ColwiseParallel, DropoutParallel, RowwiseParallel

sys.path.insert(0, str(Path(__file__).parent.parent))
from dropout_models import BATCH, LENGTH, WIDTH, P, drops_by_layer, feed_forward
from tp_models import Maker, make_mesh, tolerance
from tp_training import whole_gradients


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
