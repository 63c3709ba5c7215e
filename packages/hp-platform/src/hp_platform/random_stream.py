"""Streams of random operations: which draw of the program comes next.

A value depends on (seed, number of the operation, global index of the element) and on nothing else, so the state of a stream
is two numbers. All ranks take one number per random operation, whatever they hold of its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from hp_platform import _process

DEFAULT_SEED = 0
"""Of a process that seeds nothing: the same on all ranks, since ranks that differ would disagree silently."""


class Draw(NamedTuple):
    """The place of one operation in a stream: key and high half of the counter of the Philox generator."""

    seed: int
    number: int


class RandomStream:
    """Numbers the random operations of a program.

    ``seed``: any int, taken modulo 2**64. A stream is no tensor and lives on no device; one with the same seed on every rank
    gives every rank its part of the same global values. Streams of different seeds are independent of each other.
    """

    __slots__ = ("__weakref__", "_number", "_replays", "_seed")

    _number: int
    _replays: int
    _seed: int

    def __new__(cls, seed: int = DEFAULT_SEED) -> RandomStream:
        """Copies are made by this alone; they are streams of the process, too."""
        made = super().__new__(cls)
        made._seed, made._number, made._replays = 0, 0, 0
        _process.living_streams.add(made)
        return made

    def __init__(self, seed: int = DEFAULT_SEED) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> RandomStream:
        """Begin anew with this seed. ValueError unless it is an int."""
        self._seed, self._number = _checked(seed, "seed"), 0
        return self

    @property
    def seed(self) -> int:
        """The seed, in ``[0, 2**64)``."""
        return self._seed

    @property
    def number(self) -> int:
        """How many operations have drawn."""
        return self._number

    def next(self) -> Draw:
        """The place of the next operation; the stream goes on by one."""
        taken = Draw(self._seed, self._number)
        self._number = self._number + 1
        return taken

    def get_state(self) -> dict[str, int]:
        """For a checkpoint: ``{"seed": ..., "number": ...}``, equal on all ranks that ran the same program."""
        return {"seed": self._seed, "number": self._number}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Put back what :meth:`get_state` gave. ValueError for anything else."""
        if not isinstance(state, Mapping) or set(state) != {"seed", "number"}:
            raise ValueError(
                f"the state of a stream is a mapping with 'seed' and 'number', as get_state() gives it; got {state!r}"
            )
        seed, number = (_checked(state[name], name) for name in ("seed", "number"))
        self._seed, self._number = seed, number

    @contextmanager
    def at(self, state: Mapping[str, int]) -> Iterator[None]:
        """Inside, the stream goes on from ``state``; after it from where it was before. For the recomputation of a forward."""
        before = self.get_state()
        self.set_state(state)
        self._replays = self._replays + 1
        try:
            yield
        finally:
            self._replays = self._replays - 1
            self.set_state(before)

    @property
    def is_replaying(self) -> bool:
        """Whether operations are drawn again now, inside of :meth:`at`."""
        return self._replays > 0

    def __repr__(self) -> str:
        return f"RandomStream(seed={self._seed}, number={self._number})"


def _checked(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"the {name} of a random stream is an int, got {value!r}")
    return value % 2**64


def living_random_streams() -> list[RandomStream]:
    """All that the process holds now, the default one among them: what a recomputation winds back."""
    default_random_stream()
    return _process.living_streams.all()


def default_random_stream() -> RandomStream:
    """The stream of operations that are given none. Unseeded it has seed 0, on every rank. No communication."""
    if _process.state.random_stream is None:
        _process.state.random_stream = RandomStream()
    return _process.state.random_stream
