"""Programs with a defect must fail or compute something else, or the tests over this emulation prove nothing.

Another mutation, the doubled gradient, is in training_cases.py: it leaves the process group usable.
"""

import pytest
import ranks

LATE = {"NPU_EMULATOR_DELAY_US": "20000"}


def test_a_missing_wait_for_a_collective_is_visible() -> None:
    for value in ranks.values("mutation_cases", "awaited_and_not", 2, **LATE):
        for way, (right, wrong) in value.items():
            assert right == 2, way
            assert wrong == 1, f"{way}: the forgotten wait is not visible"


def test_a_missing_wait_for_compute_is_visible_with_compute_delay() -> None:
    for value in ranks.values(
        "mutation_cases", "side_stream_compute", 1, NPU_EMULATOR_COMPUTE_DELAY_US="20000"
    ):
        for way, (right, wrong) in value.items():
            assert right == 5, way
            assert wrong == 0, f"{way}: the forgotten wait is not visible"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("swapped_collectives", "mismatched collectives: rank 0 runs all_reduce"),
        ("mismatched_counts", "NPU stream failed: HCCL: mismatched collectives"),
        ("mismatched_dtypes_without_synchronization", "mismatched collectives"),
    ],
)
def test_ranks_that_run_different_operations_fail(program: str, says: str) -> None:
    outcomes = ranks.run("mutation_cases", program, 2)
    for outcome in outcomes:
        assert outcome.status not in (0, -9), "a rank succeeded or hung"
    assert says in "".join(outcome.errors for outcome in outcomes)


def test_sends_that_rely_on_buffering_fail() -> None:
    outcomes = ranks.run("mutation_cases", "sends_without_receiver", 2, NPU_EMULATOR_HCCL_TIMEOUT_S="5")
    assert all(outcome.status not in (0, -9) for outcome in outcomes)
    assert "does not answer within NPU_EMULATOR_HCCL_TIMEOUT_S" in outcomes[0].errors


def test_a_rank_that_dies_is_noticed_by_the_others() -> None:
    """`ranks.run` also checks that nothing of the dead rank stays on the machine."""
    survivor, dead = ranks.run("mutation_cases", "a_rank_dies", 2)
    assert dead.status == -9
    assert survivor.status not in (0, -9)
    assert "rank 1 is gone" in survivor.errors
