"""Steps of optimizers against their formulas in numpy."""

from __future__ import annotations

import numpy as np
import pytest

SHAPES = [(3, 5), (), (0, 2), (17,), (1, 1, 2)]
SETTINGS = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "amsgrad": True},
    {"eps": 1e-3, "lr_is_tensor": True, "weight_decay": 0.01},
]


def by_numpy(p, g, m, v, top, step, lr, beta1, beta2, eps, weight_decay, maximize):
    """The formula of the docstring with every operation rounded to the dtype of ``p``; numbers are rounded once."""
    n = p.dtype.type
    g = -g if maximize else g
    if weight_decay:
        p = p * n(1 - lr * weight_decay)
    m = m + (g - m) * n(1 - beta1)
    v = v * n(beta2) + g * g * n(1 - beta2)
    top = None if top is None else np.maximum(top, v)
    denominator = np.sqrt(v if top is None else top) / n((1 - beta2**step) ** 0.5) + n(eps)
    return p + m * n(-(lr / (1 - beta1**step))) / denominator, m, v, top


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(s) or "plain")
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("fused", [False, True])
def test_adamw_follows_its_formula(platform, device, make, near, lacks, real, name, setting, fused):
    if (fused and lacks("fused_adamw")) or (name == "float64" and real == "float32"):
        return
    setting = dict(setting)
    amsgrad, lr_is_tensor = setting.pop("amsgrad", False), setting.pop("lr_is_tensor", False)
    numbers = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "maximize": False,
        **setting,
    }
    random = np.random.default_rng(3)
    exact = "float64" if name == "float64" else "float32"

    def drawn(name=name):
        return [make(random.uniform(-1, 1, shape), name) for shape in SHAPES]

    params, zeros = drawn(), [make(np.zeros(shape), name) for shape in SHAPES]
    moments = [[platform.clone(x) for x in zeros] for _ in range(3 if amsgrad else 2)]
    tops = moments[2] if amsgrad else []
    expected = [
        (
            platform.to_numpy(p).astype(exact),
            *(np.zeros(s, exact),) * 2,
            np.zeros(s, exact) if amsgrad else None,
        )
        for p, s in zip(params, SHAPES, strict=True)
    ]
    lr = make(numbers["lr"], exact) if lr_is_tensor else numbers["lr"]
    for step in (1, 2, 3):
        grads = drawn()
        kept = [platform.to_bits(g).copy() for g in grads]
        platform.adamw_(
            params, grads, moments[0], moments[1], tops, step=step, fused=fused, **{**numbers, "lr": lr}
        )
        of_numpy = {**numbers, "lr": float(np.dtype(exact).type(0.1)) if lr_is_tensor else 0.1}
        expected = [
            by_numpy(*e[:1], platform.to_numpy(g).astype(exact), *e[1:], step, **of_numpy)
            for e, g in zip(expected, grads, strict=True)
        ]
        for g, bits in zip(grads, kept, strict=True):
            np.testing.assert_array_equal(platform.to_bits(g), bits)
    exactly = platform.platform_type.value == "mindspore" and name != "bfloat16"
    for at, (p, m, v, top) in enumerate(expected):
        for actual, wanted in ((params[at], p), (moments[0][at], m), (moments[1][at], v)):
            if exactly:
                np.testing.assert_array_equal(platform.to_numpy(actual), wanted)
            else:
                near(actual, wanted)
        if top is not None:
            near(tops[at], top)


def test_adamw_of_nothing_does_nothing(platform, device):
    platform.adamw_([], [], [], [], [], step=1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)


def test_a_view_may_tell_its_base(platform, make):
    whole = make(np.arange(6), "float32")
    assert platform.view_base(whole) is None
    part = platform.reshape(platform.narrow(platform.narrow(whole, 0, 1, 5), 0, 1, 4), (2, 2))
    base = platform.view_base(part)
    assert base is None or platform.data_ptr(base) == platform.data_ptr(whole)
    assert (base is None) == (platform.platform_type.value == "mindspore")
