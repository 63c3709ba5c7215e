"""What ``context_fn`` gives stands around the two runs of a checkpointed function, and how the second one ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import checkpoint


@distributed(world_size=1)
def test_a_second_run_that_ends_early_is_no_failure_for_the_function(world: World) -> None:
    platform, failed = world.platform, list[Exception]()

    def with_another_way(x: Any) -> Any:
        try:
            return platform.exp(platform.sin(x))
        except Exception as error:
            failed.append(error)
            return platform.sin(platform.exp(x))

    x = platform.set_requires_grad_(platform.full((3,), 0.5, "float32", world.device), True)
    platform.backward([platform.sum(checkpoint(with_another_way, x))])
    assert not failed
    np.testing.assert_allclose(
        platform.to_numpy(platform.get_grad(x)), np.full(3, np.exp(np.sin(0.5)) * np.cos(0.5)), rtol=1e-6
    )


@distributed(world_size=1)
def test_contexts_stand_around_both_runs_and_say_when_they_cannot_come_again(world: World) -> None:
    platform, entered = world.platform, list[str]()

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: object) -> None:
            entered.append(f"not {self.name}")

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        with Noting(name):
            yield

    for make in (Noting, noting):
        entered.clear()
        x = platform.set_requires_grad_(platform.full((3,), 0.5, "float32", world.device), True)
        y = checkpoint(platform.sin, x, context_fn=lambda: (make("one"), make("two")))  # noqa: B023
        assert entered == ["one", "not one"]
        platform.backward([platform.sum(y)], retain_graph=True)
        assert entered[2:] == ["two", "not two"]
        if make is Noting:
            platform.backward([platform.sum(y)])
            assert entered[4:] == ["two", "not two"]
        else:
            with pytest.raises(RuntimeError, match="its context_fn can be entered once only: give one that"):
                platform.backward([platform.sum(y)])
