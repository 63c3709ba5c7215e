"""The real ProcessGroupHCCL over the emulated HCCL. cases.py holds the cases; one run covers all."""

from functools import cache

import cases
import pytest
import ranks


@cache
def outcomes(world: int, delay_us: int) -> list[dict[str, str]]:
    environment = {"NPU_EMULATOR_DELAY_US": str(delay_us)}
    return ranks.values("cases", "run_all", world, **environment)


@pytest.mark.parametrize(("world", "delay_us"), [(2, 0), (4, 1000)], ids=["2-ranks", "4-ranks-late"])
@pytest.mark.parametrize("case", cases.all_cases())
def test_on_every_rank(case: str, world: int, delay_us: int) -> None:
    for rank, results in enumerate(outcomes(world, delay_us)):
        assert results[case] == "ok", f"rank {rank}:\n{results[case]}"
