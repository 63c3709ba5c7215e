"""Refusals of a framework's functions that only some ranks would see: these raise, and the others wait for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hp_dtensor.no_elements import has_gradients, without_elements
from hp_dtensor.rules.registry import Outcome
from hp_platform import get_platform

Tensor = Any
Run = Callable[..., Any]


def is_beyond(at: Tensor, n: int) -> Tensor:
    """Where numbers name none of ``n`` elements."""
    return (at < 0) | (at >= n)


def refuse_beyond(at: Tensor, n: int, *, from_end: bool = False) -> None:
    """Let the framework's own kernels refuse numbers that name none of ``n`` elements: the host does not wait for them.

    ``from_end``: whether negative numbers count from the end, as in a subscript; else as gather has it.
    """
    platform: Any = get_platform()
    row = platform.zeros((1,), "float32", platform.device_of(at)).expand((n,))
    if from_end:
        row[at]
    else:
        row.gather(0, platform.cast(platform.reshape(at, (-1,)), "int64"))


def checked(outcome: Outcome, sizes: Mapping[int, int], *, from_end: bool = False) -> Outcome:
    """The outcome of an operation whose tensors at these positions number so many elements each."""
    looks = {i: partial(refuse_beyond, n=n, from_end=from_end) for i, n in sizes.items()}
    return replace(outcome, checks=looks)


def mean_of_sums(outcome: Outcome) -> Outcome:
    """The outcome of a mean, which every rank refuses where it would take that of summands that are integers.

    Frameworks round those means, each by itself, and their sum is another one than that of the whole.
    """
    if outcome.output is None or not any(p.is_partial() for p in outcome.output):
        return outcome

    def refusing(run: Run) -> Run:
        def asked(local: Tensor, *args: Any, **named: Any) -> Any:
            if not has_gradients(local):
                name = get_platform().dtype_name(local.dtype)
                raise ValueError(
                    f"a mean of {name} is rounded, so that those of the summands of a Partial are not that of their sum: call "
                    f"reduce_partial() before, or cast to a floating dtype"
                )
            return run(local, *args, **named)

        return asked

    if outcome.run is not None:
        return replace(outcome, run=refusing(outcome.run))
    inner = outcome.around
    return replace(outcome, around=lambda function: refusing(function if inner is None else inner(function)))


def refused_by_all(run: Run, call: Run, names: Sequence[str], size: int, is_reduced: bool) -> Run:
    """``run``, before which every rank asks the function on one element whether it takes gradients for its weights.

    ``call`` gets scores and weights of ``size`` elements each, the weights by name.
    """

    def asked(*local: Any) -> Any:
        platform: Any = get_platform()

        def ones(x: Tensor) -> Tensor:
            return platform.full((size,), 1, x.dtype, platform.device_of(x))

        pairs = zip(names, local, strict=True)
        weights = {n: x for n, x in pairs if n in ("weight", "pos_weight") and platform.is_tensor(x)}
        refusable = {n: x for n, x in weights.items() if platform.requires_grad(x)}
        if refusable and platform.is_grad_enabled():
            probes = {n: platform.set_requires_grad_(ones(x), True) for n, x in refusable.items()}
            call(ones(local[0]), **probes)
        return (run if is_reduced or 0 not in local[0].shape else without_elements(run))(*local)

    return asked


def refused_if_no_dim_is_reduced(outcome: Outcome, num_dims: int) -> Outcome:
    """The outcome of a reduction over ``dim=()``, by which some functions mean all dims, as it does, and others none.

    Every rank asks on a few elements which of them this is; ValueError if none.
    """
    inner = outcome.around

    def around(function: Run) -> Run:
        run = function if inner is None else inner(function)

        def checked(local: Tensor, *args: Any, **named: Any) -> Tensor:
            platform: Any = get_platform()
            probe = platform.full((2,) * num_dims, True, "bool", platform.device_of(local))
            if 2 in function(probe, *args, **named).shape:
                raise ValueError(
                    "dim=() reduces no dim here, and is not built for DTensors: write x != 0 for the truth of each element, or "
                    "dim=None to reduce all dims"
                )
            return run(local, *args, **named)

        return checked

    return replace(outcome, around=around)
