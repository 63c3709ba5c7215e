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


def test_writes_to_lists_are_counted_where_versions_are(platform, make, lacks):
    if lacks("version_counter"):
        return
    zeros = [make(np.zeros(3), "float32") for _ in range(3)]

    def adamw(xs):
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
        platform.adamw_(
            xs,
            *([platform.clone(x) for x in zeros[:2]] for _ in range(3)),
            [],
            step=1,
            fused=False,
            **numbers,
        )

    for write in (
        adamw,
        lambda xs: platform.foreach_copy_(xs, zeros[:2]),
        lambda xs: platform.foreach_add_(xs, zeros[:2]),
        lambda xs: platform.foreach_mul_(xs, 2.0),
        lambda xs: platform.move_(xs, zeros[:2], keep=0.5, factor=1.0),
    ):
        x = platform.clone(zeros[2])
        before = platform.version(x)
        write([x, platform.clone(x)])
        assert platform.version(x) > before
        before = platform.version(x)
        write([platform.narrow(x, 0, 0, 3), platform.clone(x)])  # a write to a view is one to its base
        assert platform.version(x) > before


def test_a_view_may_tell_its_base(platform, make):
    whole = make(np.arange(6), "float32")
    assert platform.view_base(whole) is None
    part = platform.reshape(platform.narrow(platform.narrow(whole, 0, 1, 5), 0, 1, 4), (2, 2))
    base = platform.view_base(part)
    assert base is None or platform.data_ptr(base) == platform.data_ptr(whole)
    assert (base is None) == (platform.platform_type.value == "mindspore")


PIECES = [(5, 7), (1, 1), (0, 3), (64, 48), (4099,)]


def of_each_shape(random, name):
    return [random.normal(size=shape).astype(name) for shape in PIECES]


@pytest.mark.parametrize("narrow", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_moves_and_points_to_where_a_step_goes(
    platform, device, make, near, lacks, narrow, nesterov
):
    if narrow == "bfloat16" and lacks("bfloat16_compute"):
        return
    random = np.random.default_rng(4)
    start, gradients = of_each_shape(random, "float32"), of_each_shape(random, "float32")
    momenta, grads = [make(x, "float32") for x in start], [make(g, "float32") for g in gradients]
    row = platform.zeros((sum(x.size for x in start) + 1,), narrow, device)
    # Behind one element: kernels must not take parts of a tensor for aligned ones.
    parts = platform.split(row, [1, *(x.size for x in start)])[1:]
    directions = [platform.reshape(x, shape) for x, shape in zip(parts, PIECES, strict=True)]
    expected = start
    for _ in range(2):
        platform.momentum_(momenta, grads, directions, momentum=0.95, nesterov=nesterov)
        # Rounded after the product and after the sum, as by two operations.
        expected = [np.float32(0.95) * m + g for m, g in zip(expected, gradients, strict=True)]
        for m, wanted in zip(momenta, expected, strict=True):
            np.testing.assert_array_equal(platform.to_numpy(m), wanted)
    for d, m, g in zip(directions, expected, gradients, strict=True):
        assert platform.dtype_name(d.dtype) == narrow
        near(d, np.float32(0.95) * m + g if nesterov else m)
    np.testing.assert_array_equal(platform.to_numpy(row)[:1], [0])
    for g, given in zip(grads, gradients, strict=True):
        np.testing.assert_array_equal(platform.to_numpy(g), given)
    platform.momentum_([], [], [], momentum=0.95, nesterov=nesterov)


def test_momentum_in_the_most_exact_dtype_follows_its_formula(platform, make, near, real):
    random = np.random.default_rng(5)
    m, g = (random.normal(size=(3, 4)).astype(real) for _ in range(2))
    momentum, direction = make(m, real), make(np.zeros((3, 4)), real)
    platform.momentum_([momentum], [make(g, real)], [direction], momentum=0.9, nesterov=True)
    near(momentum, 0.9 * m + g)
    near(direction, 0.9 * (0.9 * m + g) + g)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "most exact"])
@pytest.mark.parametrize(("keep", "factor"), [(0.998, -0.3), (1.0, 2.0), (0.0, 1.0)])
def test_parameters_are_moved_by_updates_of_narrower_dtypes(
    platform, make, near, lacks, real, name, keep, factor
):
    if name == "bfloat16" and lacks("bfloat16_compute"):
        return
    wide, narrow = ("float32", name) if name != "most exact" else (real, real)
    random = np.random.default_rng(6)
    params = [make(x, wide) for x in of_each_shape(random, wide)]
    updates = [make(x, narrow) for x in of_each_shape(random, wide)]
    expected = [
        keep * platform.to_numpy(p).astype("float64") + factor * platform.to_numpy(u).astype("float64")
        for p, u in zip(params, updates, strict=True)
    ]
    platform.move_(params, updates, keep=keep, factor=factor)
    for p, wanted in zip(params, expected, strict=True):
        assert platform.dtype_name(p.dtype) == wide
        near(p, wanted)
    whole = make(np.ones((4, 6)), wide)
    platform.move_(
        [platform.narrow(whole, 1, 2, 3)], [make(np.ones((4, 3)), narrow)], keep=keep, factor=factor
    )
    near(platform.narrow(whole, 1, 2, 3), np.full((4, 3), keep + factor))
    near(platform.narrow(whole, 1, 0, 2), np.ones((4, 2)))
    platform.move_([], [], keep=keep, factor=factor)


@pytest.mark.parametrize(
    ("given", "wanted"), [("float32", "float32"), ("float32", "float16"), ("float16", "float32")]
)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (0, 2, 2), (2, 0, 3), (2, 64, 64)])
def test_a_quotient_is_rounded_once(platform, make, near, given, wanted, shape):
    random = np.random.default_rng(7)
    # Beyond what float16 holds, both of them.
    size = 1e6 if given == "float32" else 1.0
    x = (random.normal(size=shape) * size).astype(given)
    divisor = (random.uniform(1, 2, (shape[0], 1, 1)) * size).astype("float32")
    found = platform.quotient(make(x, given), make(divisor, "float32"), wanted)
    assert platform.dtype_name(found.dtype) == wanted
    near(found, x.astype("float64") / divisor)
    turned = platform.transpose(make(x, given), 1, 2)
    near(
        platform.quotient(turned, make(divisor, "float32"), wanted),
        x.swapaxes(1, 2).astype("float64") / divisor,
    )


def test_a_quotient_in_the_most_exact_dtype(platform, make, near, real):
    x = np.random.default_rng(8).normal(size=(2, 3, 4))
    near(platform.quotient(make(x, real), make(np.full((2, 1, 1), 3.0), real), real), x / 3)


@pytest.mark.parametrize("narrow", ["float32", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_lists_of_any_length_are_moved_whole(platform, device, make, near, narrow, count):
    # Sizes that kernels may take several of at once, of one block and of many.
    sizes = [16 * (1 + 37 * at * at) for at in range(count)]
    random = np.random.default_rng(9)
    start, gradients = ([random.normal(size=n).astype("float32") for n in sizes] for _ in range(2))
    momenta, grads = [make(x, "float32") for x in start], [make(g, "float32") for g in gradients]
    row = platform.zeros((sum(sizes),), narrow, device)
    directions = platform.split(row, sizes)
    platform.momentum_(momenta, grads, directions, momentum=0.95, nesterov=True)
    expected = [np.float32(0.95) * m + g for m, g in zip(start, gradients, strict=True)]
    for m, d, g, wanted in zip(momenta, directions, gradients, expected, strict=True):
        np.testing.assert_array_equal(platform.to_numpy(m), wanted)
        near(d, np.float32(0.95) * wanted + g)
    updates = [platform.to_numpy(d).astype("float64") for d in directions]
    platform.move_(momenta, directions, keep=0.9, factor=-0.5)
    for m, wanted, u in zip(momenta, expected, updates, strict=True):
        near(m, 0.9 * wanted.astype("float64") - 0.5 * u)


@pytest.mark.parametrize("turned", ["g", "p", "m", "mv"])
@pytest.mark.parametrize("fused", [False, True])
def test_adamw_takes_tensors_that_lie_otherwise_than_their_parameters(
    platform, make, near, lacks, fused, turned
):
    if (fused and lacks("fused_adamw")) or (turned != "g" and lacks("write_into_view")):
        return
    random = np.random.default_rng(10)
    values = {"p": random.normal(size=(3, 5)), "g": random.normal(size=(3, 5))}
    values.update(m=random.normal(size=(3, 5)), v=random.uniform(size=(3, 5)))
    p, g, m, v = (
        platform.transpose(make(x.T.copy(), "float32"), 0, 1) if name in turned else make(x, "float32")
        for name, x in values.items()
    )
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
    platform.adamw_([p], [g], [m], [v], [], step=1, fused=fused, **numbers)
    expected = by_numpy(*values.values(), None, 1, maximize=False, **numbers)
    for found, wanted in zip((p, m, v), expected[:3], strict=True):
        near(found, wanted)


@pytest.mark.parametrize("name", ["most exact", "float16", "bfloat16"])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 1), (0, 3, 2), (3, 40, 16), (1, 16, 40), (2, 264, 520)])
def test_products_whose_result_is_symmetric_are_those_of_any_matrices(
    platform, make, near, lacks, real, shape, is_turned, name
):
    if name == "bfloat16" and lacks("bfloat16_compute"):
        return
    name = real if name == "most exact" else name
    count, rows, cols = shape
    random = np.random.default_rng(11)
    given = random.normal(size=(count, cols, rows) if is_turned else shape) / max(1, rows * cols) ** 0.5
    kept = make(given, name)
    x = platform.transpose(kept, 1, 2) if is_turned else kept
    rounded = platform.to_numpy(x).astype("float64")
    gram = platform.gram(platform.set_requires_grad_(x, True) if name == "float32" else x)
    assert platform.dtype_name(gram.dtype) == name
    assert not platform.requires_grad(gram)
    near(gram, rounded @ rounded.swapaxes(1, 2))
    # What is symmetric up to rounding only may be either of both.
    symmetric = platform.to_numpy(gram).astype("float64")
    symmetric = make((symmetric + symmetric.swapaxes(1, 2)) / 2, name)
    a = platform.to_numpy(symmetric).astype("float64")
    near(platform.square_add(symmetric, alpha=2.0, beta=-4.7), 2.0 * a @ a - 4.7 * a)
