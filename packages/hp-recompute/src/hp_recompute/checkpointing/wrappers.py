"""Modules and functions that checkpoint themselves whenever they are called.

[Note: no wrapper in between] A module stays the object that it is: its forward is exchanged. So names in its state dict, attributes and
hooks stay, a sharded unit gathers around the checkpoint and not in it, and ``isinstance`` goes on telling its class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from hp_platform.forwards import check_forward
from hp_platform.platform import Platform, get_platform
from hp_recompute.checkpointing.calls import checked_options, checkpointed
from hp_recompute.checkpointing.contexts import Contexts
from hp_recompute.checkpointing.excluded import run_once
from hp_recompute.checkpointing.policies import Policy
from hp_recompute.checkpointing.region import Options, name_of

MARK = "_hp_checkpointed"
"""Attribute of a module that checkpoints itself."""


def checkpoint_wrapper(
    module: Any,
    policy: str | Policy | Iterable[Any] = "full",
    *,
    policy_fn: Policy | Iterable[Any] | None = None,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    determinism_check: str = "default",
    context_fn: Callable[[], Contexts] | None = None,
    swap_inputs: bool = False,
    group_swap: bool = False,
) -> Any:
    """Let every call of a module, or of a function, be a :func:`hp_recompute.checkpoint`.

    Args:
        module: a module: the very object is returned, whose forward now runs checkpointed inside of its hooks; names in its state
            dict, attributes and class stay. Or another callable: a function that wraps it is returned.
        policy: ``"full"``: nothing but the arguments is kept; or what ``policy_fn`` takes.
        policy_fn, preserve_rng_state, early_stop, determinism_check, context_fn, swap_inputs, group_swap: see :func:`hp_recompute.checkpoint`.

    Communication: none; in backward what forward communicates, again. UserWarning for a module that is checkpointed already, or has
    such modules inside: those would run three times. ValueError for what cannot be called, for a module without a forward such as a
    ModuleList, and for wrong options.
    """
    if policy != "full" and policy_fn is not None:
        raise ValueError(
            f"policy={policy!r} and policy_fn={policy_fn!r} say the same thing: give one of them"
        )
    if isinstance(policy, str) and policy != "full":
        raise ValueError(
            f'policy={policy!r}: "full" keeps the arguments only; for others give a list of operations or a function'
        )
    check_callable(module, "checkpoint_wrapper")
    chosen = policy_fn if isinstance(policy, str) else policy
    options = checked_options(
        chosen, preserve_rng_state, early_stop, determinism_check, context_fn, swap_inputs, group_swap
    )
    platform = get_platform()
    if not platform.is_module(module):
        return _wrapped(module, _Checkpointed(options))
    _warn_of_nesting(platform, module)
    setattr(module, MARK, True)
    platform.override_forward(module, _Checkpointed(options))
    return module


def checkpoint_exclude_wrapper(module: Any, save_output: bool = True) -> Any:
    """Let a module, or a function, inside of checkpointed ones run once: in backward its output is taken from memory.

    Args:
        module: as for :func:`checkpoint_wrapper`; outside of checkpoints it runs as ever.
        save_output: must be True: what comes after it in the second run needs its output.

    Memory: what backward needs of it, and its output. For parts that must not run twice, or whose forward costs much for the memory
    that they need. No communication of its own. ValueError for what cannot be called, for a module without a forward, and for
    ``save_output=False``.
    """
    check_callable(module, "checkpoint_exclude_wrapper")
    if save_output is not True:
        raise ValueError(
            f"save_output={save_output!r}: without its output what comes after an excluded part could not run again; leave it "
            "True, or do not exclude the part"
        )
    platform = get_platform()
    if not platform.is_module(module):
        return _wrapped(module, _run_once)
    platform.override_forward(module, _run_once)
    return module


@dataclass(frozen=True)
class _Checkpointed:
    """The forward of a module that checkpoints itself. A value, so that modules can be copied."""

    options: Options

    def __call__(
        self, module: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return checkpointed(own, args, kwargs, self.options)


def _run_once(module: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_once(own, args, kwargs)


def _wrapped(function: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(function, function, args, kwargs)

    return call


def check_callable(module: Any, where: str) -> None:
    """ValueError for what no wrapper takes."""
    if not callable(module):
        raise ValueError(f"{where} takes a module or another callable, got {type(module).__name__}")
    if isinstance(module, type):
        raise ValueError(f"{where} takes a module, got the class {module.__name__}: make one of it before")
    platform = get_platform()
    if platform.is_module(module):
        check_forward(platform, module, where)


def _warn_of_nesting(platform: Platform, module: Any) -> None:
    inside = [name or name_of(module) for name, each in platform.named_modules(module) if hasattr(each, MARK)]
    if inside:
        warnings.warn(
            f"{type(module).__name__} is checkpointed now, and so is {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''} in it: "
            "what is inside of both runs three times; wrap one of them",
            stacklevel=3,
        )
