"""Tensors are taken apart into bytes of their storage, and made again over other memory."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int64", "bool", "uint8"])
def test_views_come_back_over_a_copy_of_the_bytes_of_their_storage(platform, device, make, equal, name):
    numbers = np.arange(24).reshape(4, 6) % (2 if name == "bool" else 100)
    x = make(numbers, name)
    views = [
        x,
        platform.transpose(x, 0, 1),
        platform.narrow(x, 0, 1, 2),
        platform.narrow(x, 1, 2, 3),
        platform.narrow(platform.transpose(x, 0, 1), 0, 5, 1),
    ]
    places = [platform.storage_place(view) for view in views]
    assert len({place.key for place in places}) == 1
    assert [place.start // platform.itemsize(x.dtype) for place in places] == [0, 0, 6, 2, 5]
    assert [place.nbytes // platform.itemsize(x.dtype) for place in places] == [24, 24, 12, 21, 19]
    source = platform.storage_bytes(x, 0, platform.storage_nbytes(x))
    memory = platform.clone(source)
    platform.fill_(x, 0)
    for view, place in zip(views, places, strict=True):
        made = platform.over_bytes(memory, place.start, view.dtype, view.shape, place.strides)
        assert made.dtype == view.dtype
        assert platform.device_of(made) == platform.device_of(x)
        assert platform.storage_place(made).strides == place.strides
        expected = {(4, 6): numbers, (6, 4): numbers.T, (2, 6): numbers[1:3], (4, 3): numbers[:, 2:5]}
        equal(made, expected.get(tuple(view.shape), numbers.T[5:6]).astype(platform.to_numpy(made).dtype))


def test_a_part_of_a_storage_is_taken_and_placed_in_a_part_of_another(platform, device, make, equal):
    x = make(np.arange(24.0), "float32")
    part = platform.storage_bytes(platform.narrow(x, 0, 8, 4), 32, 16)
    memory = platform.full((64,), 0, "uint8", device)
    rest = platform.narrow(memory, 0, 16, 48)
    if platform.supports("write_into_view", device):
        platform.copy_(platform.narrow(rest, 0, 16, 16), part)
        equal(platform.over_bytes(rest, 16, x.dtype, (2, 2), (2, 1)), np.array([[8, 9], [10, 11]]))
    memory = platform.clone(part)
    equal(platform.over_bytes(memory, 4, x.dtype, (3,), (1,)), np.array([9, 10, 11]))


def test_what_has_no_bytes_has_no_place(platform, device, make):
    assert platform.storage_place(make(np.zeros((3, 0)), "float32")) is None
    one, other = make(np.ones(3), "float32"), make(np.ones(3), "float32")
    assert platform.storage_place(one).key != platform.storage_place(other).key
    if platform.supports("storage_resize", device):
        platform.resize_storage_(one, 0)
        assert platform.storage_place(one) is None


def test_tensors_over_a_storage_are_counted_where_the_framework_counts(platform, device, make):
    x = make(np.ones((2, 3)), "float32")
    if platform.num_over_storage(x) is None:
        assert platform.storage_place(platform.transpose(x, 0, 1)).strides == (1, 3)
        return
    assert platform.num_over_storage(x) == 1
    view, again = platform.transpose(x, 0, 1), platform.detach(x)
    assert platform.num_over_storage(x) == 3
    del view, again
    assert platform.num_over_storage(x) == 1
