"""AutogradOps: in-place writes are counted."""

from __future__ import annotations

import pytest


def test_in_place_writes_are_counted(platform, make, lacks):
    x = make([1.0, 2.0])
    if lacks("version_counter"):
        platform.fill_(x, 1.0)
        assert platform.version(x) == 0
        return
    before = platform.version(x)
    platform.fill_(x, 1.0)
    platform.copy_(platform.detach(x), make([2.0, 3.0]))
    assert platform.version(x) == before + 2


def test_writes_that_keep_the_version_leave_what_was_saved_valid(platform, make, leaf, equal):
    weight = make([2.0, 3.0])
    x = leaf([1.0, 1.0])
    y = platform.sum(x * weight)
    before = platform.version(weight)
    with platform.preserve_version([weight]):
        platform.fill_(weight, 0.0)
        platform.copy_(weight, make([2.0, 3.0]))
    assert platform.version(weight) == before
    platform.backward([y])
    equal(platform.get_grad(x), [2.0, 3.0])


def test_a_write_to_what_was_saved_is_caught(platform, make, leaf, lacks):
    if lacks("version_counter"):
        return
    weight = make([2.0])
    y = platform.sum(leaf([1.0]) * weight)
    platform.fill_(weight, 0.0)
    with pytest.raises(RuntimeError):
        platform.backward([y])
