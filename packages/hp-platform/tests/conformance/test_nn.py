"""NNOps: modules, and parameters in their places."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest


# --- modules
def test_modules_of_the_framework_are_known(platform, net):
    assert platform.is_module(net)
    stock = next(
        base for base in type(net).__mro__ if base.__module__.split(".")[0] in ("torch", "mindspore")
    )
    assert platform.is_module(stock())
    assert not platform.is_module(len)
    assert not platform.is_module(type(net))


def test_what_is_hung_into_modules_is_counted_where_the_framework_tells(platform, net, make):
    before = platform.num_registrations()
    again = platform.parameter(make([1.0]))
    platform.set_parameter(net.first, "bias", again)
    assert platform.num_registrations() == before
    net.first.more = again
    net.first.inner = platform.ModuleList()
    changed = platform.num_registrations() - before
    assert changed == (2 if platform.platform_type.value == "torch" else 0)
    platform.get_parameter(net.first, "more")
    assert platform.num_registrations() - before == changed


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
    equal(platform.get_grad(plain), np.broadcast_to(net.first.WEIGHT.sum(1) + net.first.BIAS, (3, 3)))
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
    equal(module.bias, module.BIAS)
    assert platform.reset_parameters(net) is False
    assert platform.reset_parameters(net.first) is False
    equal(net.first.weight, net.first.WEIGHT)


# --- modules
def test_modules_are_named_by_their_paths_the_outermost_first(platform, net):
    found = dict(platform.named_modules(net))
    assert list(found) == ["", "first", "blocks", "blocks.0", "blocks.1", "last"]
    assert found[""] is net
    assert found["blocks.1"] is net.blocks[1]


def test_a_module_in_two_places_is_named_once_or_by_both(platform, net):
    platform.set_submodule(net, "blocks.1", net.blocks[0])
    assert list(dict(platform.named_modules(net))) == ["", "first", "blocks", "blocks.0", "last"]
    found = dict(platform.named_modules(net, remove_duplicate=False))
    assert list(found) == ["", "first", "blocks", "blocks.0", "blocks.1", "last"]
    assert found["blocks.1"] is found["blocks.0"]


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


def test_names_have_no_wrappers_in_them(platform):
    assert platform.unwrapped_name("blocks.0.weight") == "blocks.0.weight"
    assert platform.unwrapped_name("") == ""
