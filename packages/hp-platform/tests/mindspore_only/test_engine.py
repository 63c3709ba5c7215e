"""The torch-style engine: models written on the platform record by themselves, and leaves gather gradients of their own."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest


@pytest.fixture
def model(platform):
    class Block(platform.Module):
        def __init__(self):
            super().__init__()
            self.weight = platform.parameter(platform.full((3, 3), 0.5))
            self.bias = platform.parameter(platform.zeros((3,)))

        def forward(self, x):
            return x + platform.silu(platform.linear(x, self.weight, self.bias))

    class Model(platform.Module):
        def __init__(self):
            super().__init__()
            self.layers = platform.ModuleList([Block(), Block()])
            self.scale = platform.parameter(platform.full((), 2.0))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return platform.mean(x * self.scale)

    return Model()


def test_a_plain_call_and_backward_fill_the_gradients_of_all_parameters(platform, model):
    names = [name for name, _ in platform.named_parameters(model)]
    assert names == ["scale", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    platform.backward([model(platform.full((2, 3), 1.0))])
    for name, parameter in platform.named_parameters(model):
        assert np.abs(platform.to_numpy(platform.get_grad(parameter))).max() > 0, name


def test_recording_survives_mindspores_functional_gradients(platform, model):
    import mindspore

    x = platform.full((2, 3), 1.0)
    parameters = [p for _, p in platform.named_parameters(model)]
    _, functional = mindspore.value_and_grad(lambda: model(x), None, mindspore.ParameterTuple(parameters))()
    platform.backward([model(x)])
    for parameter, expected in zip(parameters, functional, strict=True):
        np.testing.assert_allclose(
            platform.to_numpy(platform.get_grad(parameter)), expected.asnumpy(), rtol=1e-6
        )


def test_another_thread_records_too(platform, model):
    found = []

    def run():
        platform.backward([model(platform.full((2, 3), 1.0))])
        found.append(platform.get_grad(model.scale) is not None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]


def test_leaves_that_share_a_gradient_get_memory_of_their_own(platform):
    x, y = (platform.set_requires_grad_(platform.zeros((3,)), True) for _ in range(2))
    start = platform.full((3,), 1.0)
    platform.backward([x + y], [start])
    first, second = platform.get_grad(x), platform.get_grad(y)
    platform.mul_(first, 5.0)
    assert platform.to_numpy(second).tolist() == [1.0] * 3
    assert platform.to_numpy(start).tolist() == [1.0] * 3


def test_an_expanded_gradient_can_be_written(platform):
    x = platform.set_requires_grad_(platform.zeros((2, 3)), True)
    platform.backward([platform.sum(x)])
    grad = platform.get_grad(x)
    platform.copy_(platform.narrow(grad, 0, 0, 1), platform.zeros((1, 3)))
    assert platform.to_numpy(grad).tolist() == [[0.0] * 3, [1.0] * 3]


def test_a_leaf_with_a_hook_goes_when_nobody_holds_it(platform):
    leaf = platform.parameter(platform.zeros((2,)))
    platform.register_post_accumulate_grad_hook(leaf, lambda _: None)
    platform.backward([platform.sum(leaf * 2)])
    gone = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert gone() is None


def test_gradients_of_empty_shards_are_empty(platform):
    empty = platform.parameter(platform.zeros((0, 3)))
    rest = platform.parameter(platform.zeros((2, 3)))
    joined = platform.cat([empty, rest])
    platform.backward([platform.sum(platform.linear(platform.full((1, 3), 1.0), joined))])
    assert tuple(platform.get_grad(empty).shape) == (0, 3)
    assert platform.to_numpy(platform.get_grad(rest)).tolist() == [[1.0] * 3] * 2


def test_views_made_without_recording_are_outside_of_the_graph(platform):
    parameter = platform.parameter(platform.zeros((2, 3)))
    with platform.no_grad():
        views = [
            platform.reshape(parameter, (6,)),
            platform.transpose(parameter, 0, 1),
            platform.narrow(parameter, 0, 0, 1),
            *platform.split(parameter, (1, 1)),
        ]
    assert not any(platform.requires_grad(view) for view in views)


def test_a_module_that_was_moved_keeps_working(platform, model):
    other = model.layers[1]
    platform.set_submodule(model, "layers.0", other)
    assert [name for name, _ in platform.named_parameters(model)][1:] == ["layers.0.weight", "layers.0.bias"]
    platform.backward([model(platform.full((2, 3), 1.0))])
    assert platform.get_grad(other.weight) is not None


def test_a_tensor_is_not_taken_for_a_parameter(platform, model):
    with pytest.raises(TypeError, match=r"Model.scale is a parameter: assign a parameter, or use platform"):
        model.scale = platform.zeros(())
    assert platform.to_numpy(model.scale) == 2.0


def test_a_module_without_forward_says_so(platform):
    class Nameless(platform.Module):
        pass

    with pytest.raises(RuntimeError, match="Nameless defines no forward"):
        Nameless()(platform.zeros((1,)))


def test_random_kernels_follow_the_state(platform):
    import mindspore

    platform.manual_seed(3)
    draws = {
        "normal": lambda: mindspore.ops.randn(3),
        "dropout": lambda: mindspore.ops.dropout(platform.full((8,), 1.0), 0.5),
        "uniform": lambda: mindspore.ops.uniform((3,), platform.full((), 0.0), platform.full((), 1.0)),
    }
    for name, draw in draws.items():
        draw()
        state = platform.get_rng_state()
        first, second = platform.to_numpy(draw()).tolist(), platform.to_numpy(draw()).tolist()
        platform.set_rng_state(state)
        assert platform.to_numpy(draw()).tolist() == first, name
        assert first != second, name
