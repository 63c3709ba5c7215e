"""``checkpoint(function, *args)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hp_platform.on_platform import when_known
from hp_platform.platform import Platform, get_platform
from hp_recompute.checkpointing.agreement import check_name
from hp_recompute.checkpointing.contexts import Contexts
from hp_recompute.checkpointing.kept_collectives import without_collectives
from hp_recompute.checkpointing.policies import Policy, checked_policy
from hp_recompute.checkpointing.region import Options, Region
from hp_recompute.checkpointing.swaps import RegionSwaps


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: Policy | Iterable[Any] | None = None,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    determinism_check: str = "default",
    context_fn: Callable[[], Contexts] | None = None,
    swap_inputs: bool = False,
    group_swap: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of which backward keeps the arguments only, and computes the rest again when it needs it.

    Activation checkpointing (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174): memory for time, at
    most one more forward of the function. Outputs, gradients and random numbers are those of the plain call, to the bit, if the
    function is deterministic.

    Args:
        function: any callable. It must do the same when called again with the same arguments; what it prints or counts happens
            twice. It may call ``checkpoint`` itself, hold FSDP units and parallelised layers, and be compiled inside.
        args, kwargs: its arguments. Tensors in nested lists, tuples, dicts and dataclasses are kept by autograd, so writing to one
            before backward is an error; DTensors are taken, too.
        policy_fn: what is kept beside the arguments, and not computed again: a function ``(context, operation, *args, **kwargs)``
            that answers with a :class:`hp_recompute.CheckpointPolicy` or with True (keep), asked for every operation below autograd;
            or a list of operations, or of functions that are made of them (``[torch.matmul]``). None: nothing. See [Note: selective
            recompute] in :mod:`hp_recompute.checkpointing.policies`. Needs ``operation_dispatch``.
        preserve_rng_state: whether the second run draws the numbers of the first (dropout): the framework's generators of the cpu and
            of the arguments' devices (if all of them lie on the cpu, or there are none: of the accelerator in use), and the library's
            streams. Reading them costs some 10 us; False saves that where nothing is drawn from the framework's generators.
        early_stop: whether the second run ends when all is there that backward needs.
        determinism_check: ``"default"`` compares shapes and dtypes of what is saved, ``"operations"`` all operations of both runs (slow;
            needs ``operation_dispatch``), ``"none"`` nothing.
        context_fn: gives two context managers, for the first and for the second run; where that happens more than once (several
            backwards through one graph), the second one must be one that can be entered again.
        swap_inputs: keep the arguments in the host's memory between the two runs, as :func:`hp_recompute.swap` keeps what it swaps (what
            somebody else holds, and parameters, stay).
        group_swap: copy small ones of what is swapped packed together, results with ``MUST_SWAP`` among them.

    Without recording (no_grad) it is the plain call. A backward of a backward works, and each backward through a retained graph runs
    the function again. Communication: what ``function`` communicates in forward happens again in backward, on all ranks alike, unless
    :func:`hp_recompute.keep_collectives_policy` is the ``policy_fn``, or in its list.

    Raises :class:`hp_recompute.CheckpointError` if the second run does something else, or if a kept result was changed in place;
    ValueError for wrong options, among them a ``context_fn`` that gives anything else; NotImplementedError where operations
    cannot be watched, and a policy or check needs it.
    """
    if not callable(function):
        raise ValueError(
            f"checkpoint takes a callable and its arguments, got {type(function).__name__}: checkpoint(block, x), not "
            "checkpoint(block(x))"
        )
    options = checked_options(
        policy_fn, preserve_rng_state, early_stop, determinism_check, context_fn, swap_inputs, group_swap
    )
    return checkpointed(function, args, kwargs, options)


def checked_options(
    policy_fn: Policy | Iterable[Any] | None,
    preserve_rng_state: bool,
    early_stop: bool,
    determinism_check: str,
    context_fn: Callable[[], Contexts] | None,
    swap_inputs: bool,
    group_swap: bool,
) -> Options:
    """ValueError, or NotImplementedError, for what :func:`checkpoint` refuses."""
    platform = get_platform()
    flags = {
        "preserve_rng_state": preserve_rng_state,
        "early_stop": early_stop,
        "swap_inputs": swap_inputs,
        "group_swap": group_swap,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} is True or False, got {flag!r}")
    check_name(platform, determinism_check)
    if context_fn is not None and not callable(context_fn):
        raise ValueError(
            f"context_fn is a function that gives two context managers, got {type(context_fn).__name__}"
        )
    keeps_collectives, policy_fn = without_collectives(policy_fn)
    policy = None if policy_fn is None else checked_policy(platform, policy_fn)
    return Options(
        preserve_rng_state,
        early_stop,
        determinism_check,
        policy,
        context_fn,
        swap_inputs,
        group_swap,
        keeps_collectives,
    )


def checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """The call with options that were checked."""
    platform = get_platform()
    if not platform.is_grad_enabled():
        return function(*args, **kwargs)
    return Region(platform, function, (args, kwargs), options).first_run(args, kwargs)


@when_known
def _keep_compilers_out(platform: Platform) -> None:
    """Of what stands between a compiled caller and the function, which is compiled by itself."""
    platform.run_uncompiled([Region.__init__, Region.pack, Region.unpack, RegionSwaps.end])
    platform.run_uncompiled([checkpointed, Region.first_run, Region.run_first], recurse=False)
