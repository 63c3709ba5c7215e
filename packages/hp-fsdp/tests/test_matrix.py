"""Every kind of program in every mode under every option equals one process, and sends what is computed by hand.

The combinations are those of matrix_cases.py: every two values meet in one of them at least.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp import hsdp_sync_stream, parts
from hp_fsdp.unit import units_in
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import loss_of
from matrix_cases import FACTORS, Case, covering_cases
from matrix_modes import Sharded
from matrix_reference import Reference
from matrix_traffic import Traffic, expected_traffic, sent_traffic

CASES = covering_cases()
NUM_STEPS = 3


def low_of(world: World) -> str:
    """The low precision in which the device computes."""
    return "bfloat16" if world.platform.supports("bfloat16_compute", world.device) else "float16"


def limits_of(world: World, sharded: Sharded) -> dict[str, float]:
    """Sums over ranks and samples run in another order than in one process: some units in the last place of values below 10,
    over three steps. In low precision both sides make the same roundings, so the same holds; but not where operations on
    DTensors add partial sums of ranks, or gradients of a tied parameter in another order, and round them: up to some units
    of 2**-8 for values near 1."""
    if sharded.case.precision != "wide" and sharded.grid.has_tp:
        return {"rtol": 0.0, "atol": 2**-4}
    wide = world.platform.supports("float64_compute", world.device)
    return {"rtol": 0.0, "atol": 1e-12 if wide else 1e-5}


def norm_of(sharded: Sharded) -> Any:
    """Of all gradients, from what the placements of the pieces say: a DTensor sums over the whole tensor."""
    platform, total = sharded.platform, None
    for _, parameter in platform.named_parameters(sharded.model):
        gradient = sharded.gradient_of(parameter)
        if gradient is not None:
            squares = (gradient * gradient).sum().full_tensor()
            total = squares if total is None else total + squares
    return platform.sqrt(total)


def check_nothing_is_left(sharded: Sharded) -> None:
    """After a step no whole parameter is in memory, but for those that are the pieces themselves, or are kept on purpose."""
    for unit in units_in(sharded.platform, sharded.model):
        for param in unit.params:
            if param.is_alias or param.slot is None or (sharded.case.keep and param.trains):
                continue
            if sharded.case.keep and unit.state.value != "sharded":
                continue
            assert sharded.platform.storage_nbytes(param.full) == 0, f"{unit.label} {param.name}"


def run_step(sharded: Sharded, step: int) -> tuple[list[Any], Traffic]:
    """Its micro-batches; their outputs, and what was sent."""
    platform, case, outputs = sharded.platform, sharded.case, []
    with count_collectives() as counted:
        for part in range(sharded.num_parts):
            batch = sharded.num_parts * step + part
            sharded.sync(part)
            output = sharded.model(sharded.inputs(batch), rank=sharded.branch(sharded.grid.data_rank, batch))
            platform.backward([loss_of(platform, output)])
            outputs.append(platform.detach(output))
        if not case.last:
            hsdp_sync_stream()
    return outputs, sent_traffic(counted, sharded)


def check_sums_are_fused(sharded: Sharded, sent: Traffic, plain: Traffic) -> None:
    """Compat: of what operations on DTensors send, units send the sums of gradients together, and only when they shall."""
    for kind in {*plain.counts, *sent.counts} - {"all_reduce"}:
        assert (sent.counts[kind], sent.nbytes[kind]) == (plain.counts[kind], plain.nbytes[kind]), kind
    parts = sharded.num_parts if sharded.case.accumulate == "whole" else 1
    assert sent.nbytes["all_reduce"] * parts == plain.nbytes["all_reduce"]
    assert (
        sent.counts["all_reduce"] <= plain.counts["all_reduce"]
    )  # activations have some as well: see test_compat.py


def train(world: World, case: Case, *, is_counted: bool = True) -> None:
    """Three steps beside one process, and (``is_counted``) what they send."""
    platform, low = world.platform, low_of(world)
    sharded = Sharded(world, case, low)
    limits = limits_of(world, sharded)
    reference = Reference(world, sharded, low)
    # What operations on DTensors send, they send without units as well.
    plain = Sharded(world, case, low, is_sharded=False) if sharded.is_compat else None
    for step in range(NUM_STEPS):
        outputs, sent = run_step(sharded, step)
        if is_counted:
            if plain:
                check_sums_are_fused(sharded, sent, run_step(plain, step)[1])
            else:
                assert str(sent) == str(expected_traffic(sharded))
        for part, output in enumerate(outputs):
            wanted_output = reference.run(sharded.num_parts * step + part)
            assert_parity(output, wanted_output, **limits, name=f"output {part} of step {step}")
        wanted_pieces = {n: sharded.expected_piece(n, g) for n, g in reference.gradients.items()}
        assert_parity(sharded.gradients(), wanted_pieces, **limits, name=f"gradients of step {step}")
        if step == NUM_STEPS - 1:
            wanted_norm = np.asarray(reference.norm, sharded.maker.widest)
            assert_parity(norm_of(sharded), wanted_norm, **limits, name="norm")
        check_nothing_is_left(sharded)
        sharded.step()
        reference.step()
    # Pieces that are right here and placements that are right give right whole tensors.
    for name, parameter in platform.named_parameters(sharded.model):
        assert_parity(platform.detach(parameter), reference.values[name], **limits, name=name)


@pytest.mark.parametrize("case", CASES, ids=str)
@distributed(world_size=2)
def test_training_on_two_ranks_equals_one_process(world: World, case: Case) -> None:
    train(world, case)


@pytest.mark.parametrize("case", CASES, ids=str)
@distributed(world_size=(1, 3, 4), backends=("torch", "cuda"))
def test_training_on_other_numbers_of_ranks_equals_one_process(world: World, case: Case) -> None:
    train(world, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.mode != "compat"], ids=str)
@distributed(world_size=(2, 4), backends=("torch", "cuda"))
def test_so_it_does_where_layers_of_the_root_are_units_of_their_own(world: World, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        train(world, case, is_counted=False)


@pytest.mark.once
def test_every_pair_of_values_is_among_the_cases() -> None:
    pairs = {
        (one, getattr(case, one), other, getattr(case, other))
        for case in CASES
        for one in FACTORS
        for other in FACTORS
        if one < other
    }
    for one, values in FACTORS.items():
        for other, others in FACTORS.items():
            if one >= other:
                continue
            for value in values:
                for second in others:
                    compat = {one: value, other: second}.get("mode") == "compat"
                    if not compat:
                        assert (one, value, other, second) in pairs
