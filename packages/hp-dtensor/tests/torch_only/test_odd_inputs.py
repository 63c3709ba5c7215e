"""Complex numbers, tensors without dims, and tensors given by names that are not those of their rule."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, distribute_tensor
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, S1, TORCH, R, assert_equal, make_mesh, whole_of

OF_COMPLEX: dict[str, Callable[[Any], Any]] = {
    "conj": lambda c: c.conj(),
    "conj_physical": torch.conj_physical,
    "resolve_conj": lambda c: c.conj().resolve_conj(),
    "real": lambda c: c.real,
    "imag": torch.imag,
    "part of a conjugate": lambda c: c.conj().imag.resolve_neg(),
    "angle": lambda c: c.angle(),
    "H": lambda c: c.H,
    "squares": lambda c: c.conj() * c,
    "complex": lambda c: torch.complex(c.imag, c.real),
    "polar": lambda c: torch.polar(c.real.abs(), c.imag),
}


@pytest.mark.parametrize("name", OF_COMPLEX)
@distributed((2, 3), backends=TORCH)
def test_complex_numbers_are_taken_apart_and_conjugated(name: str, world: World) -> None:
    call = OF_COMPLEX[name]
    whole = torch.complex(whole_of(world, 3, 4), whole_of(world, 4, 3).reshape(3, 4))
    plain = whole.clone().requires_grad_()
    expected = call(plain)
    (g,) = torch.autograd.grad(torch.view_as_real(expected + 0j).square().sum(), plain)
    for at in (S0, S1, R):
        x = distribute_tensor(whole, make_mesh(world), [at]).requires_grad_()
        y = call(x)
        assert isinstance(y, DTensor) and (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert_equal(y.full_tensor().resolve_conj(), expected.resolve_conj(), f"{name} at {at}")
        loss = y.abs().square().sum() if y.is_complex() else y.square().sum()
        assert_equal(torch.autograd.grad(loss, x)[0].full_tensor(), g, f"gradient of {name} at {at}")


@distributed(2, backends=TORCH)
def test_parts_of_complex_numbers_are_views_and_of_sums_sums(world: World) -> None:
    whole = torch.complex(whole_of(world, 3, 4), whole_of(world, 3, 4) + 1)
    x = distribute_tensor(whole, make_mesh(world), [S0])
    x.imag.zero_()
    x.conj().real.mul_(2)
    assert_equal(x.full_tensor(), torch.complex(whole.real * 2, whole.real * 0))
    summand = DTensor.from_local(whole, make_mesh(world), [Partial()])
    for part in (summand.real, summand.conj().imag):
        assert part.placements == (Partial(),)
    assert_equal(summand.conj().imag.full_tensor(), whole.imag * -2)
    assert x.nbytes == whole.nbytes


@distributed(3, backends=TORCH)
def test_complex_numbers_are_reduced_and_written_as_numbers_are(world: World) -> None:
    whole = torch.complex(whole_of(world, 2, 3), whole_of(world, 2, 3))
    x = distribute_tensor(whole, make_mesh(world), [S0]).requires_grad_()  # the last rank has nothing
    total = x.sum(0)
    assert_equal(total.real.full_tensor(), whole.real.sum(0))
    (total.real.sum() + total.imag.sum() * 2).backward()
    assert_equal(
        torch.view_as_real(x.grad.full_tensor()),
        torch.tensor([1.0, 2.0], device=world.device).double().expand(2, 3, 2),
    )
    with pytest.raises(
        ValueError, match=r"mean of complex128 is not built for what is cut: take it of x\.real"
    ):
        x.mean()
    y = distribute_tensor(whole.real.clone(), make_mesh(world), [S0])
    with pytest.raises((ValueError, RuntimeError), match="cannot write complex128|can't be cast to"):
        y.add_(x.detach())
    with pytest.raises((ValueError, RuntimeError), match="cannot write complex128|can't be cast to"):
        y.add_(x.detach().redistribute(placements=[S1]))


NAMED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "clamp(min=)": lambda x, y, z: x.clamp(min=y),
    "clamp(max=)": lambda x, y, z: torch.clamp(x, max=y),
    "clamp(min=, max=)": lambda x, y, z: torch.clip(x, max=y + 1, min=y),
    "clamp_(min=)": lambda x, y, z: (x * 1).clamp_(min=y),
    "pow(exponent=)": lambda x, y, z: torch.pow(x.abs() + 1, exponent=y),
    "float_power(exponent=)": lambda x, y, z: torch.float_power(x.abs() + 1, exponent=y),
    "lerp(end=, weight=)": lambda x, y, z: torch.lerp(x, weight=z, end=y),
    "lerp(end=, number)": lambda x, y, z: x.lerp(end=y, weight=0.25),
    "addcmul(tensor1=, tensor2=)": lambda x, y, z: x.addcmul(tensor1=y, tensor2=z, value=2),
    "addcdiv(tensor1=, tensor2=)": lambda x, y, z: torch.addcdiv(x, tensor2=z.abs() + 1, tensor1=y),
    "masked_fill(mask=, value=)": lambda x, y, z: x.masked_fill(mask=y > 0, value=-1.0),
    "masked_fill(mask=, tensor)": lambda x, y, z: x.masked_fill(value=z.sum(), mask=y > 0),
}


@pytest.mark.parametrize("name", NAMED)
@distributed(2, backends=TORCH)
def test_tensors_are_given_by_the_names_that_functions_have_for_them(name: str, world: World) -> None:
    wholes = [whole_of(world, *shape) for shape in ((3, 4), (1, 4), (3, 1))]
    plain = [x.clone().requires_grad_() for x in wholes]
    expected = NAMED[name](*plain)
    grads = torch.autograd.grad(expected.square().sum(), plain, allow_unused=True)
    for at in (S0, S1, R):
        placed = [distribute_tensor(x, make_mesh(world), [at]).requires_grad_() for x in wholes]
        y = NAMED[name](*placed)
        assert_equal(y, expected, f"{name} at {at}")
        for x, g in zip(
            placed, torch.autograd.grad(y.square().sum(), placed, allow_unused=True), strict=True
        ):
            wanted = grads[[p is x for p in placed].index(True)]
            assert (g is None) == (wanted is None) or not g.full_tensor().any()
            if wanted is not None:
                assert_equal(g, wanted, f"gradient of {name} at {at}")


AT_THE_ONLY_PLACE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "transpose": lambda x, at, y: x.transpose(0, -1),
    "gather": lambda x, at, y: x.gather(0, at),
    "index_select": lambda x, at, y: x.index_select(-1, at),
    "scatter": lambda x, at, y: x.scatter(0, at, 2.0),
    "scatter_add": lambda x, at, y: x.scatter_add(0, at, y.expand(at.shape)),
    "index_add": lambda x, at, y: x.index_add(0, at, y),
    "index_copy": lambda x, at, y: x.index_copy(0, at, y),
    "index_fill": lambda x, at, y: x.index_fill(0, at, 3.0),
}


@pytest.mark.parametrize("name", AT_THE_ONLY_PLACE)
@distributed(2, backends=TORCH)
def test_numbers_name_the_only_place_of_a_tensor_without_dims(name: str, world: World) -> None:
    call, x, y = AT_THE_ONLY_PLACE[name], whole_of(world, 1)[0], whole_of(world, 2)[0]
    for of_numbers in ((), (1,)):
        at = torch.zeros(of_numbers, dtype=torch.int64, device=world.device)
        plain = [t.clone().requires_grad_() for t in (x, y)]
        expected = call(plain[0], at, plain[1])
        grads = torch.autograd.grad(expected.sum() * 3, plain, allow_unused=True)
        for place in (R, S0) if of_numbers else (R,):
            given = [distribute_tensor(t, make_mesh(world), [R]).requires_grad_() for t in (x, y)]
            found = call(given[0], distribute_tensor(at, make_mesh(world), [place]), given[1])
            assert_equal(found, expected, f"{name} at {place}")
            for own, wanted in zip(
                torch.autograd.grad(found.sum() * 3, given, allow_unused=True), grads, strict=True
            ):
                assert (own is None) == (wanted is None)
                if wanted is not None:
                    assert_equal(own, wanted, f"gradient of {name} at {place}")
    vector = distribute_tensor(whole_of(world, 3), make_mesh(world), [S0])
    assert_equal(vector.gather(0, torch.tensor(2, device=world.device)), whole_of(world, 3)[2])


@distributed(2, backends=TORCH)
def test_a_dim_of_a_tensor_without_dims_is_named(world: World) -> None:
    x = distribute_tensor(whole_of(world, 1)[0], make_mesh(world), [R])
    for call in (lambda: x.unflatten(0, (1, 1)), lambda: x.narrow(0, 0, 1), lambda: x.roll(1, 0)):
        with pytest.raises(ValueError, match=r"dim 0 of a tensor without dims: .* unsqueeze\(0\)"):
            call()


@distributed((2, 3), backends=TORCH)
def test_means_of_summands_that_are_integers_are_refused(world: World) -> None:
    whole = torch.arange(12, device=world.device).reshape(1, 3, 4)
    at = torch.tensor([0, 0, 1], device=world.device)
    calls: dict[str, Callable[[Any], Any]] = {
        "index_reduce": lambda x: x.index_reduce(1, at, x, "mean"),
        "scatter_reduce": lambda x: x.scatter_reduce(1, at.reshape(1, 3, 1).expand(1, 3, 4), x, "mean"),
    }
    if world.device_type == "cpu":  # no other device pools integers
        calls["avg_pool1d"] = lambda x: F.avg_pool1d(x, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="index_reduce", category=UserWarning)
        for name, call in calls.items():
            summands = distribute_tensor(whole, make_mesh(world), [Partial()])
            with pytest.raises(
                ValueError, match=r"a mean of int64 is rounded.* call reduce_partial\(\) before"
            ):
                call(summands)
            assert_parity(call(summands.reduce_partial()), call(whole), exact=True, name=name)
            pieces = distribute_tensor(whole, make_mesh(world), [S1])
            assert_parity(call(pieces), call(whole), exact=True, name=name)
            assert call(summands.double()).placements == (Partial(),)


@distributed(2, backends=TORCH)
def test_a_memory_format_is_that_of_the_pieces(world: World) -> None:
    whole = whole_of(world, 4, 3, 2, 5)
    for at in (S0, S1, R):
        x = distribute_tensor(whole, make_mesh(world), [at])
        y = x.to(memory_format=torch.channels_last)
        if at != S1:  # of one channel torch says both
            assert y.stride() == whole.to(memory_format=torch.channels_last).stride()
        assert y.to_local().is_contiguous(memory_format=torch.channels_last)
        assert y.to(memory_format=torch.channels_last) is y
        assert x.to(memory_format=torch.preserve_format) is x
        assert_equal(x.to(world.device, torch.float32, memory_format=torch.channels_last), whole.float())
        assert_equal(y, whole)


@distributed(2, backends=TORCH)
def test_what_has_no_elements_still_asks_for_gradients(world: World) -> None:
    x = distribute_tensor(whole_of(world, 0, 3), make_mesh(world), [S0]).requires_grad_()
    for call in (lambda x: torch.cat([x, x]), lambda x: torch.stack([x, x]), lambda x: x * 2):
        y = call(x)
        assert y.requires_grad
        y.sum().backward()
        assert x.grad.shape == (0, 3)


@distributed(2, backends=TORCH)
def test_a_tensor_without_dims_counts_as_a_vector_of_one_element(world: World) -> None:
    x, y = whole_of(world, 1)[0], whole_of(world, 2)[0]
    a, b = (distribute_tensor(t, make_mesh(world), [R]) for t in (x, y))
    assert_equal(F.cosine_similarity(a, b, dim=0), F.cosine_similarity(x, y, dim=0))
    assert_equal(a.unfold(0, 1, 1), x.unfold(0, 1, 1))
    with pytest.raises(ValueError, match="where takes a condition and two values: .* nonzero"):
        torch.where(a > 0)
    with pytest.raises(ValueError, match=r"a shape is needed, got torch.int64: .* to\(dtype\)"):
        a.view(torch.int64)
