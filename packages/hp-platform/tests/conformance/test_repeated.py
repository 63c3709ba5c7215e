"""Work that comes again, and the updates that it is made of: numbers on the device, products in given memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest


@pytest.fixture
def repeated(platform, device):
    return platform.device(device).repeated()


@pytest.mark.parametrize("is_side", [False, True], ids=["current stream", "side stream"])
def test_work_that_comes_again_gives_the_same_as_work_that_is_done_as_it_is(
    platform, device, make, equal, lacks, repeated, is_side
):
    handle = platform.device(device)
    stream = handle.new_stream(high_priority=True) if is_side else handle.current_stream()
    stream.wait_stream(handle.current_stream())
    xs = [make(np.arange(4), "float32") for _ in range(2)]
    steps = make(np.ones(4), "float32")

    def work():
        platform.foreach_add_(xs, [steps, steps])
        platform.foreach_mul_(xs, 2.0)

    expected = np.arange(4.0)
    for step in range(5):
        platform.fill_(steps, float(step))  # other values at the same place
        stream.wait_stream(handle.current_stream())
        with handle.use_stream(stream):
            before = None if lacks("version_counter") else platform.version(xs[1])
            repeated.run("twice", [*xs, steps], work, written=xs)
            if before is not None:
                assert platform.version(xs[1]) > before
            assert not repeated.is_paused
        handle.current_stream().wait_stream(stream)
        expected = (expected + step) * 2
        for x in xs:
            equal(x, expected)
    assert repeated.num_launched == (0 if lacks("recorded_work") else 4)
    assert not repeated.failures


def test_work_that_waits_or_allocates_is_done_as_it_is_and_harms_nothing(
    platform, device, make, equal, lacks, repeated
):
    handle = platform.device(device)
    x, side = make(np.ones(3), "float32"), handle.new_stream()

    def waits():
        platform.mul_(x, 2.0)
        handle.synchronize()

    def allocates():
        platform.copy_(x, platform.clone(x) + 1.0)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for where, stream in (("current", handle.current_stream()), ("side", side)):
            stream.wait_stream(handle.current_stream())
            with handle.use_stream(stream):
                for work in (waits, allocates):
                    for _ in range(3):
                        repeated.run((work.__name__, where), [x], work)
            handle.synchronize()
    expected = 1.0
    for _ in range(2):
        expected = expected * 8 + 3
    equal(x, np.full(3, expected))
    assert repeated.num_launched == 0
    names = {(name, where) for name in ("waits", "allocates") for where in ("current", "side")}
    failed = set() if lacks("recorded_work") else names
    assert set(repeated.failures) == failed
    assert len([each for each in said if each.category is RuntimeWarning]) == bool(failed)
    # Memory, random numbers and other work are as before.
    handle.empty_cache()
    platform.set_rng_state(platform.get_rng_state(device), device)
    again = handle.repeated()
    for _ in range(3):
        again.run("once more", [x], lambda: platform.mul_(x, 0.5))
    equal(x, np.full(3, expected / 8))
    assert not again.failures


@pytest.mark.parametrize("is_side", [False, True], ids=["current stream", "side stream"])
def test_products_that_come_again_have_their_workspaces(
    platform, device, make, equal, lacks, repeated, is_side
):
    handle = platform.device(device)
    stream = handle.new_stream() if is_side else handle.current_stream()
    x, y = (make(np.random.default_rng(12).normal(size=(2, 64, 64)), "float32") for _ in range(2))
    stream.wait_stream(handle.current_stream())
    with handle.use_stream(stream):
        for _ in range(3):
            platform.fill_(y, 0.0)
            repeated.run("square", [x, y], lambda: platform.matmul_add(x, x, x, beta=0.5, out=y))
        expected = platform.matmul_add(x, x, x, beta=0.5)
    handle.current_stream().wait_stream(stream)
    equal(y, platform.to_numpy(expected))
    assert not repeated.failures
    assert repeated.num_launched == (0 if lacks("recorded_work") else 2)


@pytest.mark.parametrize("narrow", ["float32", "float16"])
def test_numbers_on_the_device_move_parameters_by_the_same_bits(platform, make, narrow):
    random = np.random.default_rng(10)
    shapes = [(5, 7), (1, 1), (0, 3), (64, 48), (4099,), (16,), (32,)]
    values = [random.normal(size=(2, *shape)).astype("float32") for shape in shapes]
    updates = [make(u, narrow) for _, u in values]
    found = []
    for by_tensor in (False, True):
        params = [make(p, "float32") for p, _ in values]
        numbers = make(np.zeros(2), "float32")
        for step in (1, 2):
            keep, factor = 1.0 - 0.1 * step, -0.3 / step
            if by_tensor:
                for at, number in enumerate((keep, factor)):
                    platform.fill_(platform.narrow(numbers, 0, at, 1), number)
                platform.move_by_(params, updates, numbers)
            else:
                platform.move_(params, updates, keep=keep, factor=factor)
        found.append([platform.to_numpy(p) for p in params])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 16, 24), (3, 1, 1)])
def test_results_in_given_memory_are_those_in_new_memory(platform, device, make, lacks, name, shape):
    if name == "bfloat16" and lacks("bfloat16_compute"):
        return
    count, rows, cols = shape
    x = make(np.random.default_rng(11).normal(size=shape), name)
    divisor = make(np.arange(2.0, 2 + count).reshape(count, 1, 1), "float32")
    square = platform.gram(x)
    for make_it, size in (
        (lambda **given: platform.quotient(x, divisor, name, **given), shape),
        (lambda **given: platform.gram(x, **given), (count, rows, rows)),
        (lambda **given: platform.gram(platform.transpose(x, 1, 2), **given), (count, cols, cols)),
        (lambda **given: platform.square_add(square, alpha=2.0, beta=-1.5, **given), (count, rows, rows)),
        (lambda **given: platform.matmul_add(x, square, x, alpha=0.5, beta=2.0, **given), shape),
    ):
        # A part of something larger, as a workspace is cut.
        flat = platform.zeros((128 + int(np.prod(size)),), name, device)
        out = platform.reshape(platform.narrow(flat, 0, 128, int(np.prod(size))), size)
        returned = make_it(out=out)
        expected = platform.to_bits(make_it())
        np.testing.assert_array_equal(platform.to_bits(out), expected)
        np.testing.assert_array_equal(platform.to_bits(returned), expected)
        np.testing.assert_array_equal(platform.to_numpy(platform.narrow(flat, 0, 0, 128)), np.zeros(128))
