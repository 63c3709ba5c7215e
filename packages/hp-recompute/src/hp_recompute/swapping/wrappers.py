"""Modules and functions that swap whenever they are called, and tensors that are swapped in a layer.

[Note: a layer's own options] A module stays the object that it is, with its names; see [Note: no wrapper in between] in
:mod:`hp_recompute.checkpointing.wrappers`. How it swaps stands on it, so that a layer of a chain, which swaps only what
:func:`swap_tensor_wrapper` was given, may be wrapped later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from hp_platform.platform import get_platform
from hp_platform.protocols.local_wrapper import is_local_wrapper
from hp_recompute.checkpointing.region import name_of
from hp_recompute.checkpointing.wrappers import check_callable
from hp_recompute.swapping.calls import SwapOptions, SwapPolicy, checked_options, swapped
from hp_recompute.swapping.chain import link_of
from hp_recompute.swapping.manager import default_manager

MARK = "_hp_swapped"
"""Attribute of a module that swaps: its options."""


def swap_wrapper(
    module: Any, policy_fn: SwapPolicy | None = None, group_swap: bool = False, offload_to: str = "cpu"
) -> Any:
    """Let every call of a module, or of a function, be a :func:`hp_recompute.swap`.

    Args:
        module: a module: the very object is returned, whose forward now swaps inside of its hooks; names in its state dict,
            attributes and class stay. Or another callable: a function that wraps it is returned.
        policy_fn, group_swap: see :func:`hp_recompute.swap`.
        offload_to: ``"cpu"``, the memory of the host.

    Communication: none. UserWarning for a module that swaps already, or has such modules inside: what is inside of both belongs to the
    inner one. ValueError for what cannot be called, for a module without a forward such as a ModuleList, and for wrong options.
    """
    check_callable(module, "swap_wrapper")
    if offload_to != "cpu":
        raise ValueError(f'offload_to={offload_to!r}: what is swapped goes to the memory of the host, "cpu"')
    options = checked_options(policy_fn, group_swap)
    platform = get_platform()
    if not platform.is_module(module):

        @wraps(module, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return swapped(module, args, kwargs, options)

        return call
    inside = [
        name or name_of(module)
        for name, each in platform.named_modules(module)
        if not getattr(each, MARK, _ONLY_TAGGED).only_tagged
    ]
    if inside:
        warnings.warn(
            f"{type(module).__name__} swaps now, and so does {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''} in it: what is "
            "saved inside of both goes with the inner one; wrap one of them",
            stacklevel=2,
        )
    _install(module, options)
    return module


def _install(module: Any, options: SwapOptions) -> None:
    """A module swaps from now on, or swaps otherwise. See [Note: a layer's own options]."""
    is_new = not hasattr(module, MARK)
    setattr(module, MARK, options)
    if is_new:
        get_platform().override_forward(module, _forward)


def ensure_layer(module: Any) -> None:
    """A layer of a chain swaps, if not all, then what :func:`swap_tensor_wrapper` is given."""
    if not hasattr(module, MARK):
        _install(module, _ONLY_TAGGED)


def _forward(module: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return swapped(own, args, kwargs, getattr(module, MARK), link_of(module))


def swap_tensor_wrapper(target: Any, tag: str | None = None, group_swap: bool = False) -> Any:
    """Let one tensor of a layer's forward be swapped: what backward needs of its memory waits in the host's.

    Call it inside the forward of a layer of a chain (:meth:`hp_recompute.SwapManager.set_forward_prefetch_layer`), or of any function
    that runs in :func:`hp_recompute.swap`; the last layer of a chain keeps all that it has.

    Args:
        target: the tensor, or DTensor. It is returned, the same object.
        tag: what messages call it.
        group_swap: copy it packed together with other small tensors of the layer.

    Without recording, in a checkpointed function, and on a device without a memory of its own nothing happens. UserWarning where no
    layer is under way that swaps. ValueError for what is no tensor. Communication: none.
    """
    platform, manager = get_platform(), default_manager()
    local = target.__hp_local__() if is_local_wrapper(target) else target
    if not platform.is_tensor(local):
        raise ValueError(f"swap_tensor_wrapper takes a tensor, got {type(target).__name__}")
    if tag is not None and not isinstance(tag, str):
        raise ValueError(f"tag={tag!r}: a name for messages, or None")
    if not isinstance(group_swap, bool):
        raise ValueError(f"group_swap is True or False, got {group_swap!r}")
    if manager.is_idle:
        return target
    group = manager.current
    if group is None:
        warnings.warn(
            f"swap_tensor_wrapper was given {tag or 'a tensor'} of shape {tuple(target.shape)} where no layer is under way that swaps, so "
            "that it stays: call it in the forward of a layer of a chain (set_forward_prefetch_layer), or in swap",
            stacklevel=2,
        )
        return target
    group.choose(local, tag, fused=group_swap)
    return target


_ONLY_TAGGED = SwapOptions(only_tagged=True)
