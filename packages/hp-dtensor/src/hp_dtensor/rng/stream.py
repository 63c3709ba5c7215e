"""The default stream: seeded, saved, set back for a second forward, and given to the framework's own functions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from hp_platform import RandomStream, default_random_stream, get_platform, require

if TYPE_CHECKING:
    from hp_platform import DeviceMesh


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> RandomStream:
    """Seed the default stream; it begins anew. Returns it. Every rank calls, with the same seed.

    With pipeline stages give each stage its own seed, the same on all of its ranks: ``device_mesh`` is then the stage's mesh,
    and RuntimeError on a rank outside of it. Before training with dropout, data-parallel ranks whose samples are plain tensors
    take a seed each, else all of them drop the same. Does not touch the framework's own generators. ValueError unless ``seed``
    is an int. No communication.
    """
    if device_mesh is not None and device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"manual_seed for mesh {device_mesh} on rank {device_mesh.get_rank()}, which is not in it: call it on the ranks "
            f"of the mesh only"
        )
    return default_random_stream().manual_seed(seed)


def get_state() -> dict[str, int]:
    """The state of the default stream for a checkpoint: two ints, equal on all ranks."""
    return default_random_stream().get_state()


def set_state(state: Mapping[str, int]) -> None:
    """Let the default stream go on from what :func:`get_state` gave. ValueError for anything else."""
    default_random_stream().set_state(state)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What ``torch.utils.checkpoint.checkpoint`` takes as ``context_fn``: its second forward draws what the first one drew.

    Used as ``checkpoint(forward, x, use_reentrant=False, context_fn=hp_dtensor.random.checkpoint_contexts)``. Without it a
    draw in the second forward raises. For the default stream.
    """
    states: list[dict[str, int]] = []

    @contextmanager
    def first() -> Iterator[None]:
        states.append(get_state())
        yield

    @contextmanager
    def second() -> Iterator[None]:
        with default_random_stream().at(states[0]):
            yield

    return first(), second()


def global_draws() -> AbstractContextManager[None]:
    """Inside, the framework's own random functions on plain tensors draw from the default stream, like those on DTensors.

    For the program in one process: the model that is built and initialised in it has the values of the sharded one.
    NotImplementedError where a framework has no such blocks (MindSpore): call the functions of :mod:`hp_dtensor.random` there.
    """
    platform = get_platform()
    require(platform, "function_modes", what="global_draws()")
    adapter = importlib.import_module(f"hp_dtensor._{platform.platform_type.value}.random")
    block: AbstractContextManager[None] = adapter.GlobalDraws()
    return block
