"""Fourier transforms, and what else takes complex numbers apart, by torch's own functions: values and gradients, in float64."""

import sys
from pathlib import Path

import pytest
import torch

from hp_dtensor.rules import RULES
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from resized import add_resized
from rule_cases import Cases, Part, case, check, complexes, parts, t

CASES: Cases = {}

F = torch.fft
for name in ("fft", "ifft"):
    function = getattr(F, name)
    case(CASES, name.removeprefix("i"), function, t(5, 3))
    case(CASES, name.removeprefix("i"), function, complexes(5, 3), None, 0, "ortho")
    case(CASES, name.removeprefix("i"), function, complexes(2, 3, 5), 8, 1, "forward")
    case(CASES, name.removeprefix("i"), function, t(5, 1), 2, -2)
    case(CASES, name.removeprefix("i"), function, t(1), 3)
for name, numbers in (("rfft", t), ("ihfft", t), ("irfft", complexes), ("hfft", complexes)):
    rule, function = "rfft" if numbers is t else "irfft", getattr(F, name)
    case(CASES, rule, function, numbers(5, 3))
    case(CASES, rule, function, numbers(3, 8), norm="ortho")
    case(CASES, rule, function, numbers(2, 5, 3), 8, 1, "forward")
    case(CASES, rule, function, numbers(5, 3), n=3, dim=0)
    case(CASES, rule, function, numbers(5, 1), 1, 1)
case(CASES, "irfft", F.irfft, t(3, 5))
for name in ("fft", "ifft", "rfft", "ihfft", "irfft", "hfft"):
    rule = {"ifft": "fft", "ihfft": "rfft", "hfft": "irfft"}.get(name, name)
    numbers = {"rfft": t, "irfft": complexes}.get(rule, complexes)
    two, many = getattr(F, f"{name}2"), getattr(F, f"{name}n")
    case(CASES, f"{rule}2", two, numbers(2, 5, 3))
    case(CASES, f"{rule}2", two, numbers(5, 3, 2), (2, -1), (0, 1), "ortho")
    case(CASES, f"{rule}2", two, numbers(3, 2), s=(5, 8), norm="forward")
    case(CASES, f"{rule}n", many, numbers(2, 5, 3))
    case(CASES, f"{rule}n", many, numbers(5, 1, 3), (3, 5))
    case(CASES, f"{rule}n", many, numbers(5, 2, 3), None, (1,), "ortho")
    case(CASES, f"{rule}n", many, numbers(5, 2, 3), (8, -1), (-1, 0), "forward")
case(CASES, "fftn", F.fftn, t(5, 3), dim=())
for function in (F.fftshift, F.ifftshift):
    case(CASES, "fftshift", function, t(5, 3))
    case(CASES, "fftshift", function, complexes(2, 5, 3), (0, -1))
    case(CASES, "fftshift", function, t(8, 3), 0)

case(CASES, "view_as_real", torch.view_as_real, complexes(5, 3))
case(CASES, "view_as_complex", torch.view_as_complex, t(5, 3, 2))
case(CASES, "frexp", torch.frexp, t(5, 3))
case(CASES, "frexp", torch.frexp, t())
case(CASES, "adjoint", torch.adjoint, complexes(2, 5, 3))
case(CASES, "cast", torch.Tensor.to, t(5, 3), torch.complex128)
case(CASES, "identity", torch.Tensor.cdouble, t(5, 3))
for function in (torch.conj, torch.real, torch.imag):
    case(CASES, "conjugated", function, complexes(5, 3))

add_resized(CASES)


@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends=("torch", "cuda"))
def test_rule_gives_values_and_gradients_of_the_unsharded_operation(part: Part, world: World) -> None:
    check(CASES[part.name], part, 30)


def test_every_rule_of_this_family_is_checked() -> None:
    own = {name for name, rule in RULES.items() if rule.plan.__module__.endswith(".fourier")}
    assert own - {case.rule for case in CASES.values()} == set()
