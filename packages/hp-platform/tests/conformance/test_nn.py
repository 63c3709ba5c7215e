"""NNOps: parameters, modules, hooks, and functional operations with their gradients."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest

WEIGHT = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
BIAS = np.array([0.5, -0.5, 1.0])


@pytest.fixture
def affine(platform, make):
    """The class of a module with a weight, a bias, and a keyword argument of forward."""

    class Affine(platform.Module):
        def __init__(self, weight=WEIGHT, bias=BIAS):
            super().__init__()
            self.weight = platform.parameter(make(weight, "float32"))
            self.bias = platform.parameter(make(bias, "float32"))

        def forward(self, x, scale=1.0):
            return platform.linear(x, self.weight, self.bias) * scale

    return Affine


@pytest.fixture
def net(platform, make, affine):
    """Nested modules, a list, a buffer, and a weight that two modules share."""

    class Net(platform.Module):
        def __init__(self):
            super().__init__()
            self.first = affine()
            self.blocks = platform.ModuleList(
                [affine(np.eye(3), np.zeros(3)), affine(2 * np.eye(3), np.ones(3))]
            )
            self.last = affine()
            self.last.weight = self.first.weight
            platform.register_buffer(self, "offset", make([1.0, 2.0, 3.0]))

        def forward(self, x):
            y = self.first(x)
            for block in self.blocks:
                y = block(y)
            return y + self.offset

    return Net()


# --- modules
def test_modules_of_the_framework_are_known(platform, net):
    assert platform.is_module(net)
    stock = next(
        base for base in type(net).__mro__ if base.__module__.split(".")[0] in ("torch", "mindspore")
    )
    assert platform.is_module(stock())
    assert not platform.is_module(len)
    assert not platform.is_module(type(net))


# --- parameters
def test_a_parameter_stands_over_its_data(platform, make, equal):
    data = make([1.0, 2.0])
    parameter = platform.parameter(data)
    assert platform.is_parameter(parameter)
    assert isinstance(parameter, platform.Parameter)
    assert platform.is_tensor(parameter)
    assert platform.requires_grad(parameter)
    assert not platform.is_parameter(data)
    assert not platform.is_parameter(1.0)
    equal(parameter, [1.0, 2.0])


def test_a_frozen_parameter_asks_for_no_gradient(platform, make):
    parameter = platform.parameter(make([1, 2]), requires_grad=False)
    assert platform.is_parameter(parameter)
    assert not platform.requires_grad(parameter)


def test_parameters_are_named_by_their_paths_in_the_order_of_registration(platform, net):
    names = [name for name, _ in platform.named_parameters(net)]
    shared_once = [
        "first.weight",
        "first.bias",
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
        "blocks.1.bias",
        "last.bias",
    ]
    assert names == shared_once
    every = [name for name, _ in platform.named_parameters(net, remove_duplicate=False)]
    assert every == [*shared_once[:-1], "last.weight", "last.bias"]
    assert list(platform.named_parameters(net, recurse=False)) == []
    own = dict(platform.named_parameters(net.first, recurse=False))
    assert list(own) == ["weight", "bias"]
    assert own["weight"] is net.first.weight is net.last.weight


def test_buffers_are_named_and_are_no_parameters(platform, net, make, equal):
    (found,) = platform.named_buffers(net)
    assert found[0] == "offset"
    assert found[1] is net.offset
    equal(found[1], [1.0, 2.0, 3.0])
    platform.register_buffer(net.first, "count", make(7))
    assert [name for name, _ in platform.named_buffers(net)] == ["offset", "first.count"]
    assert [name for name, _ in platform.named_buffers(net, recurse=False)] == ["offset"]


def test_a_plain_tensor_stands_for_a_parameter_and_goes_away_again(platform, net, make, equal):
    block = net.blocks[1]
    parameter, names = block.weight, [name for name, _ in platform.named_parameters(net)]
    x = make([[1.0, 1.0]])
    before = platform.to_numpy(net(x))
    plain = platform.set_requires_grad_(make(np.zeros((3, 3)), "float32"), True)
    platform.set_parameter(block, "weight", plain)
    assert block.weight is plain
    y = net(x)
    equal(y, [[2.0, 3.0, 4.0]])
    platform.backward([platform.sum(y)])
    assert platform.get_grad(parameter) is None
    equal(platform.get_grad(plain), np.broadcast_to(WEIGHT.sum(1) + BIAS, (3, 3)))
    platform.set_parameter(block, "weight", parameter)
    assert block.weight is parameter
    assert [name for name, _ in platform.named_parameters(net)] == names
    equal(net(x), before)


def test_another_parameter_takes_the_place_of_the_old_one(platform, net, make):
    new = platform.parameter(make(np.zeros((3, 3)), "float32"))
    names = [name for name, _ in platform.named_parameters(net)]
    platform.set_parameter(net.blocks[0], "weight", new)
    assert dict(platform.named_parameters(net))["blocks.0.weight"] is new
    assert [name for name, _ in platform.named_parameters(net)] == names


def test_only_an_existing_parameter_is_replaced(platform, net, make):
    with pytest.raises(ValueError, match="'wait'"):
        platform.set_parameter(net.first, "wait", make([1.0]))


def test_an_emptied_place_of_a_parameter_holds_nothing(platform, net, make):
    block = net.blocks[0]
    last = weakref.ref(block.weight)
    plain = make(np.zeros((3, 3)), "float32")
    platform.set_parameter(block, "weight", plain)
    platform.set_parameter(block, "weight", None)
    gc.collect()
    assert last() is None
    assert block.weight is None
    assert platform.get_parameter(block, "weight") is None
    assert "blocks.0.weight" not in dict(platform.named_parameters(net))
    new = platform.parameter(plain)
    platform.set_parameter(block, "weight", new)
    assert block.weight is new


def test_what_stands_in_a_parameters_place_is_told(platform, net, make):
    block = net.blocks[0]
    parameter, plain = block.weight, make(np.zeros((3, 3)), "float32")
    assert platform.get_parameter(block, "weight") is parameter
    platform.set_parameter(block, "weight", plain)
    assert platform.get_parameter(block, "weight") is plain
    platform.set_parameter(block, "weight", platform.get_parameter(block, "weight"))
    assert block.weight is plain
    platform.set_parameter(block, "weight", parameter)
    assert platform.get_parameter(block, "weight") is parameter
    for module, name in ((block, "wait"), (net, "offset"), (net, "first"), (net, "blocks.0.weight")):
        with pytest.raises(ValueError, match=f"'{name}'"):
            platform.get_parameter(module, name)


def test_a_place_that_is_looked_up_once_takes_parameters_and_plain_tensors(platform, net, make, equal):
    block = net.blocks[0]
    parameter, plain = block.weight, make(np.zeros((3, 3)), "float32")
    put, get = platform.parameter_setter(block, "weight"), platform.parameter_getter(block, "weight")
    for value in (plain, parameter, plain, parameter):
        put(value)
        assert block.weight is value
        assert platform.get_parameter(block, "weight") is value
        assert get() is value
    with pytest.raises(ValueError, match="'wait'"):
        platform.parameter_setter(block, "wait")
    with pytest.raises(ValueError, match="wait"):
        platform.parameter_getter(block, "wait")


@pytest.mark.parametrize(
    ("name", "wide"), [("float16", "float32"), ("float32", "float64"), ("float32", "float32")]
)
def test_a_product_in_a_wider_dtype_is_rounded_once(platform, make, near, lacks, name, wide):
    if wide == "float64" and lacks("float64_compute"):
        return
    random = np.random.default_rng(5)
    x, y = random.normal(size=(5, 70)).astype(name), random.normal(size=(70, 3)).astype(name)
    product = platform.matmul_in(platform.set_requires_grad_(make(x, name), True), make(y, name), wide)
    assert platform.dtype_name(product.dtype) == wide
    assert not platform.requires_grad(product)
    near(product, x.astype("float64") @ y.astype("float64"))


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (0, 7, 3), (5, 0, 3), (5, 7, 0)])
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("added", ["nothing", "itself", "a row"])
def test_a_product_is_written_into_a_part_of_a_tensor(platform, make, near, equal, real, shape, batch, added):
    n, k, m = shape
    random = np.random.default_rng(6)
    x, y = random.normal(size=(*batch, n, k)).astype(real), random.normal(size=(k, m)).astype(real)
    before, row = random.normal(size=(*batch, n + 2, m)).astype(real), random.normal(size=m).astype(real)
    whole = make(before, real)
    part = platform.narrow(whole, len(batch), 1, n)
    add = {"nothing": None, "itself": part, "a row": make(row, real)}[added]
    product = platform.matmul_into(part, platform.set_requires_grad_(make(x, real), True), make(y, real), add)
    assert product is part
    assert not platform.requires_grad(whole)
    extra = {"nothing": 0.0, "itself": before[..., 1 : n + 1, :], "a row": row}[added]
    near(part, x @ y + extra)
    equal(platform.narrow(whole, len(batch), 0, 1), before[..., :1, :])
    equal(platform.narrow(whole, len(batch), n + 1, 1), before[..., n + 1 :, :])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_halves_are_added_up_where_a_wider_dtype_is_wanted(platform, make, dtype):
    """2048 ones and one more are 2048 in float16, and 256 in bfloat16."""
    ones = make(np.ones((4, 2049)), dtype)
    out = make(np.full((4, 4), np.nan), "float32")
    turned = platform.transpose(ones, 0, 1)
    platform.matmul_into(out, ones, turned)
    assert platform.to_numpy(out).tolist() == [[2049.0] * 4] * 4
    platform.matmul_into(out, ones, turned, out)
    assert platform.to_numpy(out).tolist() == [[4098.0] * 4] * 4


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (0, 7, 3), (5, 0, 3), (5, 7, 0)])
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("factors", [{}, {"beta": 4.0848}, {"alpha": -6.8946, "beta": 0.1}])
def test_a_product_of_batches_is_scaled_and_added(platform, make, near, real, shape, batch, factors):
    n, k, m = shape
    random = np.random.default_rng(8)
    add, x, y = (random.normal(size=(batch, *s)).astype(real) for s in ((n, m), (n, k), (k, m)))
    given = make(x, real)
    result = platform.matmul_add(
        make(add, real), platform.set_requires_grad_(given, True), make(y, real), **factors
    )
    assert platform.dtype_name(result.dtype) == real
    assert not platform.requires_grad(result)
    near(result, factors.get("beta", 1) * add + factors.get("alpha", 1) * (x @ y))


def test_batches_that_lie_transposed_are_multiplied_and_added(platform, make, near, real):
    x = np.random.default_rng(9).normal(size=(2, 3, 5)).astype(real)
    given = make(x, real)
    gram = platform.matmul(platform.transpose(given, 1, 2), given)
    near(platform.matmul_add(gram, gram, gram, alpha=2.0), (g := x.swapaxes(1, 2) @ x) + 2 * g @ g)
    near(platform.matmul_add(given, given, gram, beta=0.5), x / 2 + x @ g)


@pytest.mark.parametrize(
    ("name", "wide"), [("float32", None), ("float32", "float64"), ("float16", "float32")]
)
def test_a_norm_is_taken_over_dims_in_the_dtype_that_is_asked_for(
    platform, make, near, equal, lacks, name, wide
):
    if wide == "float64" and lacks("float64_compute"):
        return
    x = np.random.default_rng(10).normal(size=(3, 4, 5)).astype(name)
    expected = np.sqrt((x.astype("float64") ** 2).sum((1, 2)))
    given = platform.set_requires_grad_(make(x, name), True)
    norm = platform.norm(given, (1, 2), dtype=wide)
    assert platform.dtype_name(norm.dtype) == (wide or name)
    assert not platform.requires_grad(norm)
    near(norm, expected)
    near(platform.norm(given, (1, 2), keepdim=True, dtype=wide), expected[:, None, None])
    near(platform.norm(given, -1, dtype=wide), np.sqrt((x.astype("float64") ** 2).sum(-1)))
    equal(platform.norm(make(np.zeros((2, 0, 3)), name), (1, 2), dtype=wide), np.zeros(2))


def test_products_are_made_in_the_dtype_of_their_operands(platform, make, real):
    for name in ("float32", "float16", real):
        x = make(np.ones((2, 2)), name)
        assert platform.product_dtype(x) == x.dtype


def test_a_product_takes_a_matrix_that_lies_transposed(platform, make, near, real):
    random = np.random.default_rng(7)
    x, w = random.normal(size=(2, 3, 4)).astype(real), random.normal(size=(5, 4)).astype(real)
    out = make(np.zeros((2, 6, 5)), real)
    platform.matmul_into(
        platform.narrow(out, 1, 3, 3), make(x, real), platform.transpose(make(w, real), 0, 1)
    )
    near(platform.narrow(out, 1, 3, 3), x @ w.T)


def test_a_module_that_can_initialises_its_own_parameters_where_they_are(platform, affine, net, equal):
    class Resetting(affine):
        def __init__(self):
            super().__init__()
            self.child = Resetting.Child()

        class Child(affine):
            def reset_parameters(self):
                raise AssertionError("a sub-module is asked by itself")

        def reset_parameters(self):
            platform.fill_(self.weight, 7.0)

    module = Resetting()
    weight = module.weight
    assert platform.reset_parameters(module) is True
    assert module.weight is weight
    equal(weight, np.full((3, 2), 7.0))
    equal(module.bias, BIAS)
    assert platform.reset_parameters(net) is False
    assert platform.reset_parameters(net.first) is False
    equal(net.first.weight, WEIGHT)


# --- modules
def test_modules_are_named_by_their_paths_the_outermost_first(platform, net):
    found = dict(platform.named_modules(net))
    assert list(found) == ["", "first", "blocks", "blocks.0", "blocks.1", "last"]
    assert found[""] is net
    assert found["blocks.1"] is net.blocks[1]


def test_a_module_is_found_by_its_path(platform, net):
    assert platform.get_submodule(net, "") is net
    assert platform.get_submodule(net, "blocks.0") is net.blocks[0]
    for wrong in ("blocks.7", "nothing", "first.weight"):
        with pytest.raises(AttributeError) as caught:
            platform.get_submodule(net, wrong)
        assert wrong in str(caught.value)


def test_a_module_is_replaced_by_its_path(platform, net, affine, make, equal):
    new = affine(np.zeros((3, 3)), np.zeros(3))
    platform.set_submodule(net, "blocks.1", new)
    assert net.blocks[1] is new
    assert platform.get_submodule(net, "blocks.1") is new
    assert list(dict(platform.named_modules(net))) == ["", "first", "blocks", "blocks.0", "blocks.1", "last"]
    equal(net(make([[1.0, 1.0]])), [[1.0, 2.0, 3.0]])
    other = affine()
    platform.set_submodule(net, "first", other)
    assert net.first is other
    with pytest.raises(AttributeError, match="nothing"):
        platform.set_submodule(net, "nothing", new)


def test_a_module_list_has_a_length_an_order_and_indices(platform, net):
    assert len(net.blocks) == 2
    assert list(net.blocks) == [net.blocks[0], net.blocks[1]]
    assert net.blocks[-1] is net.blocks[1]


def test_training_mode_reaches_all_modules(platform, net):
    for mode in (False, True):
        platform.set_training(net, mode)
        assert [module.training for _, module in platform.named_modules(net)] == [mode] * 6


def test_a_state_dict_shares_memory_with_parameters_and_buffers(platform, net):
    state = platform.state_dict(net)
    assert set(state) == {name for name, _ in platform.named_parameters(net, remove_duplicate=False)} | {
        "offset"
    }
    for name, parameter in platform.named_parameters(net, remove_duplicate=False):
        assert platform.data_ptr(state[name]) == platform.data_ptr(parameter)
        assert not platform.requires_grad(state[name])


def test_backward_through_modules_fills_the_gradients_of_all_parameters(platform, net, make, equal):
    platform.backward([platform.sum(net(make([[1.0, 2.0]])))])
    gradients = {name: platform.get_grad(parameter) for name, parameter in platform.named_parameters(net)}
    assert gradients.pop("last.bias") is None
    equal(gradients["blocks.1.bias"], [1.0, 1.0, 1.0])
    equal(gradients["blocks.0.bias"], [2.0, 2.0, 2.0])
    equal(gradients["first.weight"], [[2.0, 4.0]] * 3)


# --- hooks
def test_forward_hooks_see_and_replace_arguments_and_output(platform, affine, make, equal):
    module, seen = affine(), []
    x = make([[1.0, 0.0]])

    def before(hooked, args, kwargs):
        seen.append(("before", hooked is module, len(args), dict(kwargs)))
        return (args[0] * 2,), {"scale": 10.0}

    def after(hooked, args, kwargs, output):
        seen.append(("after", hooked is module, len(args), dict(kwargs)))
        return output + 1

    handles = [
        platform.register_forward_pre_hook(module, before),
        platform.register_forward_hook(module, after),
    ]
    equal(module(x, scale=3.0), [[26.0, 56.0, 111.0]])
    assert seen == [("before", True, 1, {"scale": 3.0}), ("after", True, 1, {"scale": 10.0})]
    for handle in handles:
        handle.remove()
        handle.remove()
    equal(module(x), [[1.5, 2.5, 6.0]])
    assert len(seen) == 2


def test_a_hook_that_returns_none_changes_nothing(platform, affine, make, equal):
    module = affine()
    platform.register_forward_pre_hook(module, lambda hooked, args, kwargs: None)
    platform.register_forward_hook(module, lambda hooked, args, kwargs, output: None)
    equal(module(make([[1.0, 0.0]]), scale=2.0), [[3.0, 5.0, 12.0]])


def test_functions_that_stay_uncompiled_run_as_ever(platform):
    class Counter:
        total = 0

        def add(self, n):
            self.total = self.total + n
            return self.total

    counter = Counter()
    platform.run_uncompiled([counter.add, abs])
    assert [counter.add(2), counter.add(3)] == [2, 5]


def test_hooks_run_in_the_order_of_registration_and_prepended_ones_first(platform, affine, make):
    module, order = affine(), []
    platform.register_forward_pre_hook(module, lambda *_: order.append("pre 1"))
    platform.register_forward_pre_hook(module, lambda *_: order.append("pre 2"))
    platform.register_forward_pre_hook(module, lambda *_: order.append("pre 0"), prepend=True)
    platform.register_forward_hook(module, lambda *_: order.append("post 1"))
    platform.register_forward_hook(module, lambda *_: order.append("post 2"))
    platform.register_forward_hook(module, lambda *_: order.append("post 0"), prepend=True)
    module(make([[1.0, 0.0]]))
    assert order == ["pre 0", "pre 1", "pre 2", "post 0", "post 1", "post 2"]


def test_hooks_removed_while_others_stay(platform, affine, make):
    module, order = affine(), []
    handles = [platform.register_forward_hook(module, lambda *_, i=i: order.append(i)) for i in range(3)]
    handles[1].remove()
    module(make([[1.0, 0.0]]))
    assert order == [0, 2]


def test_backward_hooks_see_and_replace_gradients(platform, affine, make, equal):
    module, seen = affine(), []
    x = platform.set_requires_grad_(make([[1.0, 0.0]]), True)

    def before(hooked, grad_output):
        seen.append(("before", hooked is module, platform.to_numpy(grad_output[0]).tolist()))
        return (grad_output[0] * 2,)

    def after(hooked, grad_input, grad_output):
        seen.append(("after", hooked is module, platform.to_numpy(grad_output[0]).tolist()))
        return (grad_input[0] * 10,)

    handles = [
        platform.register_backward_pre_hook(module, before),
        platform.register_backward_hook(module, after),
    ]
    platform.backward([platform.sum(module(x))])
    assert seen == [("before", True, [[1.0, 1.0, 1.0]]), ("after", True, [[2.0, 2.0, 2.0]])]
    equal(platform.get_grad(x), [[180.0, 240.0]])
    equal(platform.get_grad(module.bias), [2.0, 2.0, 2.0])
    for handle in handles:
        handle.remove()
    platform.set_grad(x, None)
    platform.backward([platform.sum(module(x))])
    equal(platform.get_grad(x), [[9.0, 12.0]])
    assert len(seen) == 2


# --- functional operations against numpy, their gradients against finite differences of the numpy function
def erf(x):
    return np.vectorize(math.erf)(x)


def np_softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def np_attention(q, k, v, causal):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return np_softmax(scores) @ v


TARGET = np.array([2, 0, 1])
IDS = np.array([[2, 0], [2, 3]])
POSITIVE = "positive"  # arguments are made positive
# name of the case: (function of the platform, the same in numpy, shapes of the differentiated arguments, options)
CASES = {
    "linear": (lambda p, m, x, w: p.linear(x, w), lambda x, w: x @ w.T, [(2, 3, 4), (5, 4)]),
    "linear with bias": (
        lambda p, m, x, w, b: p.linear(x, w, b),
        lambda x, w, b: x @ w.T + b,
        [(3, 4), (5, 4), (5,)],
    ),
    "linear of no rows": (lambda p, m, x, w: p.linear(x, w), lambda x, w: x @ w.T, [(0, 4), (5, 4)]),
    "matmul": (lambda p, m, x, y: p.matmul(x, y), np.matmul, [(3, 4), (4, 2)]),
    "matmul with broadcast batches": (
        lambda p, m, x, y: p.matmul(x, y),
        np.matmul,
        [(2, 1, 3, 4), (5, 4, 2)],
    ),
    "operator @": (lambda p, m, x, y: x @ y, np.matmul, [(2, 3, 4), (4, 2)]),
    "embedding": (lambda p, m, w: p.embedding(m(IDS), w), lambda w: w[IDS], [(4, 3)]),
    "softmax": (lambda p, m, x: p.softmax(x), np_softmax, [(3, 5)]),
    "softmax along dim 0": (lambda p, m, x: p.softmax(x, 0), lambda x: np_softmax(x, 0), [(3, 5)]),
    "silu": (lambda p, m, x: p.silu(x), lambda x: x / (1 + np.exp(-x)), [(3, 5)]),
    "relu": (lambda p, m, x: p.relu(x), lambda x: np.maximum(x, 0), [(3, 5)]),
    "gelu": (lambda p, m, x: p.gelu(x), lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, [(3, 5)]),
    "rsqrt": (lambda p, m, x: p.rsqrt(x), lambda x: x**-0.5, [(3, 5)], POSITIVE),
    "sqrt": (lambda p, m, x: p.sqrt(x), np.sqrt, [(3, 5)], POSITIVE),
    "exp": (lambda p, m, x: p.exp(x), np.exp, [(3, 5)]),
    "log": (lambda p, m, x: p.log(x), np.log, [(3, 5)], POSITIVE),
    "cos": (lambda p, m, x: p.cos(x), np.cos, [(3, 5)]),
    "sin": (lambda p, m, x: p.sin(x), np.sin, [(3, 5)]),
    "sum of all": (lambda p, m, x: p.sum(x), np.sum, [(3, 5)]),
    "sum along a dim": (lambda p, m, x: p.sum(x, -1), lambda x: x.sum(-1), [(3, 5)]),
    "sum along dims, kept": (
        lambda p, m, x: p.sum(x, (0, 2), keepdim=True),
        lambda x: x.sum((0, 2), keepdims=True),
        [(2, 3, 4)],
    ),
    "sum of nothing": (lambda p, m, x: p.sum(x, 0), lambda x: x.sum(0), [(0, 3)]),
    "mean of all": (lambda p, m, x: p.mean(x), np.mean, [(3, 5)]),
    "mean along a dim, kept": (
        lambda p, m, x: p.mean(x, -1, keepdim=True),
        lambda x: x.mean(-1, keepdims=True),
        [(3, 5)],
    ),
    "mean along dims": (lambda p, m, x: p.mean(x, (0, 1)), lambda x: x.mean((0, 1)), [(2, 3, 4)]),
    "cross entropy": (
        lambda p, m, x: p.cross_entropy(x, m(TARGET)),
        lambda x: -np.mean(np.log(np_softmax(x))[np.arange(3), TARGET]),
        [(3, 4)],
    ),
    "attention": (
        lambda p, m, q, k, v: p.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: np_attention(q, k, v, False),
        [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)],
    ),
    "causal attention": (
        lambda p, m, q, k, v: p.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: np_attention(q, k, v, True),
        [(2, 2, 4, 4)] * 3,
    ),
    "operators": (
        lambda p, m, x, y: (x + y) * x - y / 2 + 1,
        lambda x, y: (x + y) * x - y / 2 + 1,
        [(2, 3), (3,)],
    ),
    "a slice": (lambda p, m, x: x[1:, ::2], lambda x: x[1:, ::2], [(3, 5)]),
}


def arguments(case):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in case[2]]
    return [np.abs(a) + 0.5 for a in arrays] if case[3:] == (POSITIVE,) else arrays


def differences(function, arrays, weights, step=1e-6):
    """Central differences of ``sum(weights * function(*arrays))``: exact to about ``step**2`` and 1e-16 / ``step``."""
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            values = []
            for shifted in (kept + step, kept - step):
                array[index] = shifted
                values.append(np.sum(weights * function(*arrays)))
            array[index] = kept
            gradient[index] = (values[0] - values[1]) / (2 * step)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_function_and_its_gradients_equal_numpys(platform, make, near, lacks, dtype, name):
    if dtype == "float64" and lacks("float64_compute"):
        return
    function, reference = CASES[name][:2]
    arrays = arguments(CASES[name])
    inputs = [platform.set_requires_grad_(make(a, dtype), True) for a in arrays]
    output = function(platform, make, *inputs)
    assert platform.dtype_name(output.dtype) == dtype
    expected = reference(*arrays)
    near(output, expected)
    weights = np.random.default_rng(1).standard_normal(np.shape(expected))
    platform.backward([output], [make(weights, dtype)])
    for x, gradient in zip(inputs, differences(reference, arrays, weights), strict=True):
        # The differences themselves are good to 1e-9 of the largest value; float32 rounds at 1e-7 per operation.
        near(platform.get_grad(x), gradient, rtol=1e-7 if dtype == "float64" else 3e-5)


@pytest.mark.parametrize("name", ["linear", "matmul", "softmax", "silu", "gelu", "sum of all", "mean of all"])
def test_bfloat16_is_computed_to_its_precision(platform, make, near, lacks, name):
    if lacks("bfloat16_compute"):
        return
    function, reference = CASES[name][:2]
    tensors = [make(a, "bfloat16") for a in arguments(CASES[name])]
    output = function(platform, make, *tensors)
    assert platform.dtype_name(output.dtype) == "bfloat16"
    # Inputs are compared as rounded; 2**-8 per rounding, of at most three in a row.
    near(output, reference(*(platform.to_numpy(t).astype(np.float64) for t in tensors)), rtol=3 * 2.0**-8)


def test_integers_are_summed(platform, make, equal):
    equal(platform.sum(make([[1, 2], [3, 4]]), 0), [4, 6])


def test_cross_entropy_of_large_logits_does_not_overflow(platform, make, near):
    near(platform.cross_entropy(make([[1000.0, 0.0], [0.0, 1000.0]]), make([0, 0])), 500.0)


def test_names_have_no_wrappers_in_them(platform):
    assert platform.unwrapped_name("blocks.0.weight") == "blocks.0.weight"
    assert platform.unwrapped_name("") == ""
