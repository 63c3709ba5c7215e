"""Losses of scores by kernels, against numpy in float64. Where a platform has none, it says so, for every dtype."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hp_platform.protocols import ScoreKernels

IGNORED = -100
CLASSES = 5000


def _exact(scores, target, weight, smoothing, incoming):
    """Losses, counts and the gradient of the scores."""
    kept = target != IGNORED
    own = np.where(kept, target, 0)
    with np.errstate(invalid="ignore"):
        largest = scores.max(1, keepdims=True)
        lse = largest + np.log(np.exp(scores - largest).sum(1, keepdims=True))
        share = (1 - smoothing) * np.eye(scores.shape[1])[own] * weight + smoothing / scores.shape[1] * weight
        share = share * kept[:, None]
        losses = np.where(kept, np.where(share > 0, share * (lse - scores), 0).sum(1), 0)
        gradient = np.exp(scores - lse) * share.sum(1, keepdims=True) - share
    return losses, weight[own] * kept, gradient * np.where(kept, incoming, 0)[:, None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("cuts", [(0, CLASSES), (0, 1, 1, 2049, CLASSES)], ids=["whole", "cut"])
def test_a_loss_by_kernels_is_that_of_its_formula(
    platform, make, device, cuts, is_weighted, smoothing, dtype
):
    random = np.random.default_rng(3)
    x = make(random.uniform(-3, 3, (7, CLASSES)), dtype)
    kernels: ScoreKernels | None = platform.score_kernels(x)
    if kernels is None:
        assert not (device == "cuda" and platform.platform_type.value == "torch"), "Triton comes with torch"
        return
    target = random.integers(0, CLASSES, 7)
    target[2] = IGNORED
    weight = random.uniform(0.5, 1.5, CLASSES) if is_weighted else np.ones(CLASSES)
    incoming = random.uniform(-1, 1, 7)
    scores = platform.to_numpy(x).astype(np.float64)
    losses, counts, gradient = _exact(scores, target, weight, smoothing, incoming)

    ids, weights = make(target, "int64"), make(weight, "float32")
    parts = [(start, stop - start) for start, stop in itertools.pairwise(cuts)]

    def of(part):
        return platform.narrow(weights, 0, *part) if is_weighted else None

    options = {"ignore_index": IGNORED, "has_spread": smoothing > 0}
    told = [
        kernels.sums(platform.narrow(x, 1, *part), ids, of(part), start=part[0], **options) for part in parts
    ]
    added = None
    for part in parts:
        own = platform.narrow(x, 1, *part)
        added = kernels.sums(own, ids, of(part), start=part[0], told=added, **options)
    for found in (platform.cat(told), added):
        result = kernels.losses(
            found,
            ids,
            num_classes=CLASSES,
            ignore_index=IGNORED,
            label_smoothing=smoothing,
            is_weighted=is_weighted,
        )
        np.testing.assert_allclose(platform.to_numpy(result[0]), losses, rtol=0, atol=1e-5)
        np.testing.assert_allclose(platform.to_numpy(result[1]), counts, rtol=0, atol=1e-6)
        assert platform.to_numpy(result[5]).tolist() == np.where(target == IGNORED, 0, target).tolist()
    out = platform.clone(x)
    for part in parts:
        own = platform.narrow(out, 1, *part)  # in place
        kernels.gradient(
            own,
            own,
            ids,
            of(part),
            tuple(result[2:5]),
            make(incoming, "float32"),
            start=part[0],
            ignore_index=IGNORED,
            of_spread=smoothing / CLASSES,
        )
    # Rounded once, to 24, 8 or 11 bits, of values below 1.5.
    atol = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(platform.to_numpy(out).astype(np.float64), gradient, rtol=0, atol=atol)


def test_infinite_and_missing_scores_stay_in_their_rows(platform, make):
    x = np.zeros((4, 10))
    x[0, 3], x[1, :5], x[2], x[3, 9] = np.nan, -np.inf, -np.inf, np.inf
    kernels = platform.score_kernels(make(x, "float32"))
    if kernels is None:
        assert platform.score_kernels(make(x, "float16")) is None
        return
    target = np.array([0, 7, 2, 9])
    ids = make(target, "int64")
    options = {"ignore_index": IGNORED, "has_spread": False}
    halves = [(0, make(x[:, :5], "float32")), (5, make(x[:, 5:], "float32"))]
    told = platform.cat([kernels.sums(half, ids, None, start=start, **options) for start, half in halves])
    found = kernels.losses(
        told, ids, num_classes=10, ignore_index=IGNORED, label_smoothing=0.0, is_weighted=False
    )
    np.testing.assert_allclose(platform.to_numpy(found[0]), [np.nan, np.log(5), np.nan, np.nan], atol=1e-6)
