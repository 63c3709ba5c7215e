"""What cannot fit is refused before it is tried, and nothing that might fit is."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hp_platform import get_platform
from hyper_parallel.trainer.errors import UsageError
from hyper_parallel.trainer.options import ModelSize, Options, options_of, parser
from hyper_parallel.trainer.sizes import check_fits, least_bytes, num_parameters

pytestmark = pytest.mark.once


def options(*arguments: str, nproc: int = 1) -> Options:
    return options_of(parser("train").parse_args(arguments), device="cpu", nproc=nproc)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    from hyper_parallel.trainer.model import Decoder

    size = ModelSize(dim=8, layers=3, heads=2, hidden=12, length=16)
    platform = get_platform()
    model = Decoder(size, seed=0, dtype="float32", device="cpu")
    assert num_parameters(size) == sum(math.prod(p.shape) for _, p in platform.named_parameters(model))


@pytest.mark.parametrize("arguments", [(), ("--dtype", "float64"), ("--dtype", "bfloat16")])
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_the_default_job_fits_into_a_gibibyte(arguments: tuple[str, ...], nproc: int) -> None:
    job = options(*arguments, nproc=nproc)
    assert least_bytes(job) > 4 * num_parameters(job.size)
    check_fits(job, 2**30, processes=nproc)


@pytest.mark.parametrize("name", ["dim", "hidden", "layers", "batch", "length"])
def test_an_impossible_size_is_refused_with_what_it_needs(name: str) -> None:
    job = options(f"--{name}", "1000000000", *(("--heads", "1") if name == "dim" else ()))
    with pytest.raises(
        UsageError, match=r"need at least [\d,]+ GiB, this machine has 256: .* give smaller ones"
    ):
        check_fits(job, 2**38)


def test_the_limit_is_that_of_all_processes_together() -> None:
    job = options(nproc=2)
    check_fits(job, 2 * least_bytes(job), processes=2)
    with pytest.raises(UsageError, match="need at least 1 GiB, this machine has 0"):
        check_fits(job, 2 * least_bytes(job) - 1, processes=2)
    with pytest.raises(UsageError, match="a cuda device has 0"):
        check_fits(dataclasses.replace(job, device="cuda"), least_bytes(job) - 1)


@pytest.mark.parametrize(
    "name", ["steps", "batch", "length", "dim", "layers", "heads", "hidden", "save-every"]
)
def test_numbers_have_an_end(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name} must be at most 2147483647, got more"):
        options(f"--{name}", "9" * 4000)
