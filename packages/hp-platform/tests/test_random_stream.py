"""Streams number random operations; their state goes into checkpoints and back."""

import gc
import pickle
import weakref

import pytest

from hp_platform import RandomStream, default_random_stream
from hp_platform.random_stream import Draw, living_random_streams

pytestmark = pytest.mark.once


def test_a_stream_counts_operations():
    stream = RandomStream(7)
    assert [stream.next(), stream.next()] == [Draw(7, 0), Draw(7, 1)]
    assert (stream.seed, stream.number) == (7, 2)
    assert repr(stream) == "RandomStream(seed=7, number=2)"
    assert stream.manual_seed(-1).next() == Draw(2**64 - 1, 0)


def test_a_stream_goes_on_from_its_state():
    stream = RandomStream(3)
    stream.next()
    state = stream.get_state()
    after = [stream.next() for _ in range(3)]
    other = RandomStream()
    other.set_state(state)
    assert [other.next() for _ in range(3)] == after


def test_a_recomputation_draws_what_was_drawn_and_the_stream_goes_on_after_it():
    stream = RandomStream(3)
    state = stream.get_state()
    drawn = [stream.next(), stream.next()]
    with stream.at(state):
        assert stream.is_replaying
        assert [stream.next(), stream.next()] == drawn
    assert not stream.is_replaying
    assert stream.next() == Draw(3, 2)


def test_there_is_one_default_stream():
    assert default_random_stream() is default_random_stream()


@pytest.mark.parametrize("seed", [1.0, "1", True, None])
def test_a_seed_that_is_no_int_is_refused(seed):
    with pytest.raises(ValueError, match="is an int"):
        RandomStream(seed)


@pytest.mark.parametrize("state", [None, {}, {"seed": 1}, {"seed": 1, "number": 1.5}, 3])
def test_a_state_that_is_none_is_refused_and_changes_nothing(state):
    stream = RandomStream(2)
    with pytest.raises(ValueError, match="stream"):
        stream.set_state(state)
    assert stream.get_state() == {"seed": 2, "number": 0}


def test_streams_are_known_while_somebody_holds_them_and_so_are_copies():
    made = RandomStream(3)
    copied = pickle.loads(pickle.dumps(made))
    held = living_random_streams()
    assert all(any(one is each for one in held) for each in (made, copied, default_random_stream()))
    assert copied.get_state() == made.get_state()
    address = weakref.ref(made)
    del made, held
    gc.collect()
    assert address() is None
