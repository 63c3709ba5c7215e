"""Tests of distributed programs: an opt-in pytest plugin and what its tests need (extra ``[testing]``).

Switch it on with ``pytest -p hp_platform.testing.plugin`` or in ``addopts``. A test then says on how many ranks it runs::

    from hp_platform import collectives
    from hp_platform.testing import World, assert_parity, count_collectives, distributed

    @distributed(world_size=(1, 2, 4))
    def test_sum_of_ones_is_the_number_of_ranks(world: World) -> None:
        ones = world.platform.full((3,), 1.0, "float32", world.device)
        with count_collectives() as counted:
            total = collectives.all_reduce(ones)
        assert_parity(total, ones * world.size, exact=True, name="total")
        counted.assert_counts(all_reduce=1 if world.size > 1 else 0)

The test function runs on every rank, in worker processes that start once per run. Its fixtures and parameters are made in
the pytest process and sent to the workers. Which backends run is chosen by ``HP_TEST_BACKENDS``. The fixture ``programs``
(:class:`hp_platform.testing.programs.Programs`) runs a whole Python program, such as an example of a guide.
"""

from typing import TYPE_CHECKING

from hp_platform.lazy import attach

if TYPE_CHECKING:
    from hp_platform.testing.counting import Counted, count_collectives
    from hp_platform.testing.decorator import distributed
    from hp_platform.testing.exports import assert_exports
    from hp_platform.testing.parity import assert_parity
    from hp_platform.testing.world import World

    __all__ = ["Counted", "World", "assert_exports", "assert_parity", "count_collectives", "distributed"]
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Counted": "counting",
            "World": "world",
            "assert_exports": "exports",
            "assert_parity": "parity",
            "count_collectives": "counting",
            "distributed": "decorator",
        },
    )
