"""Other forwards of modules that ``torch.compile`` has made, which pass attributes on to the module in them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hp_platform.overridden import FORWARD_ATTRIBUTE
from hp_platform.platform import get_platform


def doubled(module, own, args, kwargs):
    return 2.0 * own(*args, **kwargs)


@pytest.fixture
def platform():
    return get_platform()


@pytest.fixture
def compiled(platform):
    linear = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(linear.weight, 0.5)
    torch.nn.init.constant_(linear.bias, 0.25)
    module = torch.compile(linear, backend="eager")
    platform.override_forward(module, doubled)
    return module


def test_a_deep_copy_runs_the_other_forward_around_its_own_parameters(compiled):
    twin, x = copy.deepcopy(compiled), torch.ones(1, 2)
    before = compiled(x)
    assert type(twin) is type(compiled)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.weight.add_(1.0)
    assert torch.equal(twin(x), before + 4.0)
    assert torch.equal(compiled(x), before)


def test_a_shallow_copy_shares_the_module_inside(platform, compiled):
    platform.override_forward(compiled, doubled)
    twin, x = copy.copy(compiled), torch.ones(1, 2)
    assert twin._orig_mod is compiled._orig_mod
    assert torch.equal(twin(x), 4.0 * compiled._orig_mod(x))


def test_a_forward_that_is_exchanged_stays_on_the_outer_module(platform, compiled):
    inner, x = compiled._orig_mod, torch.ones(1, 2)
    setattr(compiled, FORWARD_ATTRIBUTE, vars(compiled)[FORWARD_ATTRIBUTE])
    assert FORWARD_ATTRIBUTE not in vars(inner)
    before = inner(x)
    platform.override_forward(inner, doubled)
    assert torch.equal(inner(x), 2.0 * before)


def test_other_modules_are_pickled_with_it(platform):
    module, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
    platform.override_forward(module, doubled)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
