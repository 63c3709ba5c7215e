"""NNOps: what stock layers compute, forwards in others' places, and compiled functions."""

from __future__ import annotations

import copy
import importlib

import pytest

STOCK = {"torch": "torch.nn", "mindspore": "mindspore.mint.nn"}


@pytest.fixture(scope="session")
def stock(platform):
    """Where the framework keeps its layers."""
    return importlib.import_module(STOCK[platform.platform_type.value])


def test_stock_layers_say_what_they_compute(platform, stock):
    assert platform.layer_kind(stock.Linear(2, 3)) == "linear"
    assert platform.layer_kind(stock.Embedding(2, 3)) == "embedding"
    assert platform.layer_kind(stock.Conv2d(2, 3, 1)) == "convolution"
    assert platform.layer_kind(stock.LayerNorm(3)) == "layer_norm"
    assert platform.layer_kind(stock.Dropout(0.5)) == "dropout"
    assert platform.layer_kind(platform.ModuleList([])) is None


def test_a_derived_layer_is_of_the_kind_and_its_own_forward_is_seen(platform, stock):
    class Same(stock.Linear):
        pass

    class Other(stock.Linear):
        def forward(self, x):
            return x

        construct = forward

    assert platform.layer_kind(Same(2, 3)) == platform.layer_kind(Other(2, 3)) == "linear"
    assert platform.has_stock_forward(Same(2, 3))
    assert not platform.has_stock_forward(Other(2, 3))


class Scaled:
    """A forward that multiplies what the former one gives."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, own, args, kwargs):
        return own(*args, **kwargs) * self.factor


def build(platform, make):
    class Affine(platform.Module):
        def __init__(self):
            super().__init__()
            self.weight = platform.parameter(make([[1.0, 2.0]], "float32"))

        def forward(self, x, scale=1.0):
            return platform.linear(x, self.weight) * scale

    return Affine()


def test_another_forward_runs_in_the_place_of_a_modules(platform, make):
    module = build(platform, make)
    other = type(module)()
    x = make([[3.0, 4.0]], "float32")
    platform.override_forward(module, Scaled(2.0))
    assert platform.to_numpy(module(x, scale=3.0)).tolist() == [[66.0]]
    assert isinstance(module, type(other))
    assert type(module).__name__ == "Affine"
    assert platform.to_numpy(other(x)).tolist() == [[11.0]]
    platform.override_forward(module, Scaled(5.0))
    assert platform.to_numpy(module(x)).tolist() == [[110.0]]


def test_a_forward_that_stands_on_the_module_itself_runs_inside_of_another_one(platform, make):
    module = build(platform, make)
    method = "forward" if hasattr(module, "forward") else "construct"
    own = getattr(module, method)
    object.__setattr__(module, method, lambda x: own(x) + 1.0)
    platform.override_forward(module, Scaled(2.0))
    platform.override_forward(module, Scaled(3.0))
    assert platform.to_numpy(module(make([[3.0, 4.0]], "float32"))).tolist() == [[72.0]]


def test_hooks_stay_around_another_forward(platform, make):
    module, seen = build(platform, make), []
    platform.override_forward(module, Scaled(2.0))
    platform.register_forward_pre_hook(module, lambda module, args, kwargs: ((args[0] + 1.0,), kwargs))
    platform.register_forward_hook(
        module, lambda module, args, kwargs, y: seen.append(platform.to_numpy(y).tolist())
    )
    module(make([[3.0, 4.0]], "float32"))
    assert seen == [[[28.0]]]


def test_a_module_with_another_forward_is_copied_with_it(platform, make):
    module = build(platform, make)
    platform.override_forward(module, Scaled(2.0))
    if platform.platform_type.value == "mindspore":
        pytest.skip("mindspore: a cell cannot be copied")
    twin = copy.deepcopy(module)
    assert type(twin) is type(module)
    assert platform.to_numpy(twin(make([[3.0, 4.0]], "float32"))).tolist() == [[22.0]]


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo makes a Function
def test_a_compiled_function_is_one_graph(platform, make, lacks):
    assert not platform.is_compiling()
    asked = []

    class Twice(platform.TraceableFunction):
        @staticmethod
        def forward(ctx, x):
            return x * 2.0

        @staticmethod
        def backward(ctx, g):
            return g * 2.0

    def function(x):
        asked.append(platform.is_compiling())
        return Twice.apply(x * 3.0)

    if lacks("traced_collectives"):
        with pytest.raises(NotImplementedError, match="leave the compilation out"):
            platform.compile(function)
        return
    x = platform.set_requires_grad_(make([1.0, 2.0], "float32"), True)
    y = platform.compile(function, backend="aot_eager")(x)
    assert asked == [True]
    assert platform.to_numpy(y).tolist() == [6.0, 12.0]
    platform.backward([platform.sum(y)])
    assert platform.to_numpy(platform.get_grad(x)).tolist() == [6.0, 6.0]


def test_writes_are_counted_where_they_show_in_the_version(platform, make, device):
    x = make([1.0], "float32")
    before = platform.version(x)
    platform.add_(x, 1.0)
    counts = platform.counts_writes(x)
    assert counts == platform.supports("version_counter", device)
    assert (platform.version(x) > before) == counts
