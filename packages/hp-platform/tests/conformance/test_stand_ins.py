"""Tensors that are made when something is done with them: whole parameters that a sharded model needs now and then."""

from __future__ import annotations

import numpy as np
import pytest

WEIGHT = np.arange(12.0).reshape(3, 4) / 10


def test_a_stand_in_knows_its_shape_and_is_made_by_the_first_function(platform, device, make, equal, lacks):
    if lacks("stand_ins"):
        return
    whole, asked = platform.set_requires_grad_(make(WEIGHT, "float32"), True), []

    def get():
        asked.append(1)
        return whole

    made = platform.stand_in((3, 4), whole.dtype, platform.device_of(whole), get)
    assert (tuple(made.shape), made.ndim, made.dtype) == ((3, 4), 2, whole.dtype)
    assert platform.device_of(made) == platform.device_of(whole)
    assert platform.is_tensor(made)
    assert not asked
    x = make(np.ones((2, 4)), "float32")
    y = platform.linear(x, made)
    equal(y, np.ones((2, 4), "float32") @ WEIGHT.astype("float32").T)
    platform.backward([platform.sum(y + platform.sum(made))])
    equal(platform.get_grad(whole), np.full((3, 4), 8.0))
    assert len(asked) == 2


def test_linear_may_be_taken_into_other_hands(platform, device, make, equal, lacks):
    if lacks("stand_ins"):
        return
    whole, bias = make(WEIGHT, "float32"), make(np.ones(3), "float32")
    calls = []

    def linear(x, given):
        calls.append(given is bias)
        return platform.linear(x, whole, given) * 2.0

    made = platform.stand_in((3, 4), whole.dtype, platform.device_of(whole), lambda: whole, linear)
    x = make(np.ones((2, 4)), "float32")
    plain = platform.to_numpy(platform.linear(x, whole, bias))
    equal(platform.linear(x, made, bias), 2 * plain)
    equal(platform.linear(x, made) / 2.0, platform.to_numpy(platform.linear(x, whole)))
    equal(platform.sum(made), platform.to_numpy(platform.sum(whole)))
    assert calls == [True, False]


def test_where_nothing_can_stand_in_the_call_says_so(platform, device, make):
    if platform.supports("stand_ins", device):
        return
    x = make(WEIGHT, "float32")
    with pytest.raises(NotImplementedError, match="stand in"):
        platform.stand_in((3, 4), x.dtype, platform.device_of(x), lambda: x)
