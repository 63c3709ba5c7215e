"""FlashAttentionScore on DTensors. It has no kernel on cpu, so what runs on local tensors here is the composed form.

That is tested against numpy, the rule with it by the checker, and the way from MindSpore's arguments to the rule by calls.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, ops

from hp_dtensor import Replicate, Shard, distribute_tensor, random
from hp_dtensor._mindspore.composed.attention import attention
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from rule_cases import Cases, case, check, t
from spelled import check_call

BATCH, HEADS, LENGTH, SIZE = 2, 4, 5, 3
_DRAW = np.random.RandomState(0)
Q, K, V = (_DRAW.randn(BATCH, HEADS, LENGTH, SIZE) for _ in range(3))
K2, V2 = (_DRAW.randn(BATCH, 2, LENGTH, SIZE) for _ in range(2))
CAUSAL = np.tri(LENGTH, dtype=np.bool_)


def _by_numpy(q: Any, k: Any, v: Any, seen: Any = None, scale: float = SIZE**-0.5) -> Any:
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-2, -1) * scale
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_of_numpy(world: World) -> None:
    q, k, v, k2, v2 = map(Tensor, (Q, K, V, K2, V2))
    found = {
        "plain": (attention(q, k, v), _by_numpy(Q, K, V)),
        "scaled": (attention(q, k, v, scale=0.3), _by_numpy(Q, K, V, scale=0.3)),
        "causal": (attention(q, k, v, is_causal=True), _by_numpy(Q, K, V, CAUSAL)),
        "masked": (attention(q, k, v, Tensor(CAUSAL)), _by_numpy(Q, K, V, CAUSAL)),
        "of groups": (attention(q, k2, v2, enable_gqa=True), _by_numpy(Q, K2, V2)),
    }
    for name, (value, expected) in found.items():
        np.testing.assert_allclose(world.platform.to_numpy(value), expected, rtol=0, atol=1e-12, err_msg=name)


CASES: Cases = {}
_rule = "scaled_dot_product_attention"
case(CASES, _rule, attention, t(2, 4, 5, 3), t(2, 4, 5, 3), t(2, 4, 5, 3))
case(CASES, _rule, attention, t(1, 2, 5, 3), t(1, 2, 5, 3), t(1, 2, 5, 3), None, 0.0, True)
case(CASES, _rule, attention, t(2, 2, 3, 3), t(2, 2, 5, 3), t(2, 2, 5, 3), None, 0.0, True, scale=0.5)
case(CASES, _rule, attention, t(1, 4, 3, 2), t(1, 2, 3, 2), t(1, 2, 3, 2), enable_gqa=True)


# Exponentials of scores up to 60 and their sums in float64.
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends="mindspore")
def test_attention_gives_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    check(CASES[name], samples=3, tolerance=1e-8)


def _flash(**options: Any) -> Callable[..., Any]:
    given = {"input_layout": "BNSD", "scalar_value": SIZE**-0.5, **options}

    def call(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        masks = {"attn_mask": mask[0]} if mask else {}
        return ops.flash_attention_score(q, k, v, HEADS, **masks, **given)

    return call


def _in_layout(layout: str, x: Any) -> Any:
    if layout == "BNSD":
        return x
    x = x.transpose(0, 2, 1, 3)
    if layout == "BSND":
        return x.copy()
    x = x.reshape(BATCH, LENGTH, -1)
    return (x.transpose(1, 0, 2) if layout == "SBH" else x).copy()


def _back(layout: str, y: Any) -> Any:
    if layout == "BNSD":
        return y
    y = y.swapaxes(1, 2)
    if layout == "BSND":
        return y
    y = y.reshape((BATCH, LENGTH, HEADS * SIZE))
    return y.swapaxes(0, 1) if layout == "SBH" else y


def _forward(layout: str, x: Any) -> Any:
    if layout == "BNSD":
        return x
    x = x.swapaxes(0, 1) if layout == "SBH" else x
    if layout != "BSND":
        x = x.reshape((BATCH, LENGTH, -1, SIZE))
    return x.swapaxes(1, 2)


@distributed(2, backends="mindspore")
def test_flash_attention_in_every_layout_is_that_of_the_whole(world: World) -> None:
    for layout in ("BNSD", "BSND", "BSH", "SBH"):

        def expected(q: Any, k: Any, v: Any, layout: str = layout) -> Any:
            q, k, v = (_forward(layout, x) for x in (q, k, v))
            return _back(layout, attention(q, k, v, enable_gqa=True))

        tensors = [Tensor(_in_layout(layout, x)) for x in (Q, K2, V2)]
        check_call(world, layout, _flash(input_layout=layout), expected, tensors)


@distributed(2, backends="mindspore")
def test_masks_of_the_kernel_are_true_where_a_key_is_not_seen(world: World) -> None:
    hidden = Tensor((~CAUSAL).astype(np.uint8))
    band = Tensor(CAUSAL & ~np.tri(LENGTH, k=-2, dtype=np.bool_))
    calls = {
        "given mask": (lambda q, k, v: _flash()(q, k, v, hidden), Tensor(CAUSAL)),
        "band": (lambda q, k, v: _flash(pre_tokens=1, next_tokens=0)(q, k, v, hidden), band),
        "whole mask": (lambda q, k, v: _flash(sparse_mode=1)(q, k, v, hidden), Tensor(CAUSAL)),
        "causal": (lambda q, k, v: _flash(sparse_mode=2)(q, k, v, hidden), Tensor(CAUSAL)),
        "causal from the end": (lambda q, k, v: _flash(sparse_mode=3)(q, k, v, hidden), Tensor(CAUSAL)),
    }
    for name, (call, seen) in calls.items():
        check_call(
            world,
            name,
            call,
            lambda q, k, v, seen=seen: attention(q, k, v, seen),
            list(map(Tensor, (Q, K, V))),
        )
    # Fewer queries than keys: the last query sees the last key.
    seen = Tensor(CAUSAL[3:])
    call = lambda q, k, v: _flash(sparse_mode=3)(q, k, v, hidden)
    tensors = [Tensor(Q[:, :, 3:].copy()), Tensor(K), Tensor(V)]
    check_call(world, "two queries", call, lambda q, k, v: attention(q, k, v, seen), tensors)


@distributed(2, backends="mindspore")
def test_cut_heads_and_cut_batches_need_no_communication(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for places in ((1, 1, 1), (0, 0, 0)):
        q, k, v = (
            distribute_tensor(Tensor(x), mesh, [Shard(d)]) for x, d in zip((Q, K, V), places, strict=True)
        )
        with count_collectives() as counted:
            y = _flash(sparse_mode=2)(q, k, v, Tensor((~CAUSAL).astype(np.uint8)))
        counted.assert_counts()
        assert y.placements == (Shard(places[0]),)


@distributed(1, backends="mindspore")
def test_what_the_rule_does_not_know_is_refused_with_ways_out(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    q, k, v = (distribute_tensor(Tensor(x), mesh, [Shard(0)]) for x in (Q, K, V))
    for options in ({"sparse_mode": 4}, {"actual_seq_qlen": (5, 10), "actual_seq_kvlen": (5, 10)}):
        with pytest.raises(NotImplementedError, match=r"mindspore .*takes query, key, value and attn_mask"):
            _flash(**options)(q, k, v)
    with pytest.raises(ValueError, match="a probability lies between 0 and 1, got -0.5"):
        _flash(keep_prob=1.5)(q, k, v)


@distributed(2, backends="mindspore")
def test_dropped_probabilities_do_not_depend_on_what_is_cut(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        q, k, v = (distribute_tensor(Tensor(x), mesh, [placement]) for x in (Q, K, V))
        random.manual_seed(3)
        found.append(_flash(keep_prob=0.6)(q, k, v).full_tensor().asnumpy())
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[2], found[0], rtol=0, atol=1e-12)
    kept = (
        _flash()(*(distribute_tensor(Tensor(x), mesh, [Replicate()]) for x in (Q, K, V)))
        .full_tensor()
        .asnumpy()
    )
    assert np.abs(kept - found[0]).max() > 0.05
