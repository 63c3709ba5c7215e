"""``swap(function, *args)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_platform.on_platform import when_known
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.tensor import Tensor
from hp_recompute.checkpointing.policies import CheckpointPolicy
from hp_recompute.checkpointing.region import name_of
from hp_recompute.swapping.chain import Link
from hp_recompute.swapping.group import Group
from hp_recompute.swapping.manager import SwapManager, default_manager
from hp_recompute.swapping.storage import SavedTensor

SwapPolicy = Callable[[Tensor], CheckpointPolicy]


@dataclass(frozen=True)
class SwapOptions:
    """How a call swaps; see :func:`swap`."""

    policy: SwapPolicy | None = None
    group_swap: bool = False
    stays_nbytes: int = 0
    """Of what may go, this much stays: the largest memories that fit, as a whole."""
    only_tagged: bool = False
    """Whether only what :func:`hp_recompute.swap_tensor_wrapper` was given is swapped."""

    def is_swapped(self, x: Tensor) -> bool:
        """RuntimeError for an answer that is none."""
        if self.policy is None:
            return True
        answer = self.policy(x)
        if answer is CheckpointPolicy.MUST_SWAP or answer is CheckpointPolicy.MUST_SAVE:
            return answer is CheckpointPolicy.MUST_SWAP
        raise RuntimeError(
            f"policy_fn of swap answered {answer!r} for a tensor of shape {tuple(x.shape)}: give CheckpointPolicy.MUST_SWAP (to the "
            "host) or CheckpointPolicy.MUST_SAVE (stays); what is to be computed again is checkpoint's"
        )


def swap(
    function: Callable[..., Any] | Sequence[Any],
    *args: Any,
    policy_fn: SwapPolicy | None = None,
    group_swap: bool = False,
    device_budget_bytes: int | None = None,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of which what backward needs waits in the host's memory.

    Values and gradients are those of the plain call, to the bit: nothing is computed again. What autograd saves in the function is
    copied to page-locked memory of the host while the next swapped function runs, and comes back while backward is at the one behind
    it: see [Note: two groups on the device] in :mod:`hp_recompute.swapping.manager`. The last one that runs stays where it is. From the
    second step on copies take longer where there is more on the device anyway, if the calls that keep what they save are known, too:
    layers in a chain (:meth:`hp_recompute.SwapManager.set_forward_prefetch_layer`), or a policy that answers ``MUST_SAVE``.

    Args:
        function: any callable; with ``device_budget_bytes`` a model, or its layers.
        args, kwargs: its arguments.
        policy_fn: asked for every tensor that is saved and may be swapped: ``CheckpointPolicy.MUST_SWAP``, or ``MUST_SAVE`` to let it
            stay. None: all are swapped. Never swapped: parameters and views of them, tensors on the host, without elements, or with
            memory that somebody else holds beyond the function (its outputs).
        group_swap: copy small tensors packed together, in buckets of at most 32 MiB.
        device_budget_bytes: another way to call it, ``swap(model, step, device_budget_bytes=...)``: ``model`` is a list of layers, or a
            module with a ModuleList of them, and ``step()`` does a forward and a backward of it, which runs three times to be measured.
            From then on each layer keeps, swaps or computes again what it saves, so that at most so many bytes of it are on the device
            at the same time, in the way that is predicted to add the least time; the result is a :class:`hp_recompute.BudgetPlan`, which
            prints as a table. Another call gives another budget. Meant for layers that run once per micro-batch, with one in flight.
            All ranks of ``process_group=`` (default: all that there are) call it alike, and get the same plan: layers that
            communicate must be computed again by all of them or by none. Stages of a pipeline give their own ranks.

    On a device without a memory of its own (cpu), without recording, and inside of a checkpointed function, whose insides are not kept
    at all, it is the plain call: there the checkpoint's ``policy_fn`` says what is swapped instead, by ``MUST_SWAP``. Communication: none, but for
    a budget: there an all-gather of what the ranks have measured, some 100 bytes per layer.

    Raises RuntimeError for another answer of ``policy_fn``, and in backward if a saved tensor was changed in place; ValueError for what
    is not callable and for wrong options; NotImplementedError for a budget on a device without a memory of its own.
    """
    if device_budget_bytes is not None:
        if policy_fn is not None or group_swap:
            raise ValueError(
                "swap with device_budget_bytes chooses itself what is swapped: leave policy_fn and group_swap out"
            )
        return _fitted(function, args, kwargs, device_budget_bytes)
    if not callable(function):
        raise ValueError(
            f"swap takes a callable and its arguments, got {type(function).__name__}: swap(block, x), not swap(block(x))"
        )
    return swapped(function, args, kwargs, checked_options(policy_fn, group_swap))


def _fitted(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], budget: int) -> Any:
    from hp_recompute.swapping.fitted import fit

    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        raise ValueError(f"device_budget_bytes is a positive number of bytes, got {budget!r}")
    if len(args) != 1 or kwargs.keys() - {"process_group"} or not callable(args[0]):
        raise ValueError(
            "swap with device_budget_bytes takes a model and a function that does a step with it, forward and backward: "
            "swap(model, step, device_budget_bytes=...)"
        )
    return fit(model, args[0], budget, **kwargs)


def checked_options(policy_fn: SwapPolicy | None, group_swap: bool) -> SwapOptions:
    """ValueError for what :func:`swap` refuses."""
    if policy_fn is not None and not callable(policy_fn):
        raise ValueError(
            f"policy_fn of swap is a function of a tensor that answers CheckpointPolicy.MUST_SWAP or MUST_SAVE, got {policy_fn!r}"
        )
    if not isinstance(group_swap, bool):
        raise ValueError(f"group_swap is True or False, got {group_swap!r}")
    return SwapOptions(policy_fn, group_swap)


def swapped(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SwapOptions,
    link: Link | None = None,
) -> Any:
    """The call with options that were checked. ``link``: its place in a chain."""
    platform, manager = get_platform(), default_manager()
    if manager.is_idle:
        return function(*args, **kwargs)
    group = manager.begin(
        name_of(function), fused=options.group_swap, only_chosen=options.only_tagged, link=link
    )
    group.stays_nbytes = options.stays_nbytes
    out = None
    try:
        with platform.saved_tensors_hooks(lambda x: group.save(x, options.is_swapped), SavedTensor.get):
            out = function(*args, **kwargs)
    finally:
        manager.end(group, out)
    return out


@when_known
def _keep_compilers_out(platform: Platform) -> None:
    """Of what stands between a compiled caller and the function, which is compiled by itself."""
    platform.run_uncompiled([SwapManager.begin, SwapManager.end, Group.save, SavedTensor.get])
    platform.run_uncompiled([swap, swapped], recurse=False)
