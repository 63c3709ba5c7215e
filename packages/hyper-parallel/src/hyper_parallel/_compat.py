"""Other spellings of the same calls, which programs in the field use. The packages speak one spelling; here the others are taken.

Every function stands under its own name and does what its package's does; what it takes besides is listed in :data:`SPELLINGS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import hp_fsdp

SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "fully_shard": {"mixed_precision": "mp_policy"},
    "set_gradient_scaling_factor": {"scale_factor": "factor"},
}
"""Function -> the other keyword and the one that it stands for. Both at once are a TypeError."""


def _respelled(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the package's spelling."""
    found = dict(given)
    for other, own in SPELLINGS[function].items():
        if other not in found:
            continue
        if own in found:
            raise TypeError(
                f"{function} got {own} and {other}, which are two names of one argument: give one"
            )
        found[own] = found.pop(other)
    return found


def fully_shard(module: Any, mesh: Any = None, *, overlap: bool = True, **options: Any) -> Any:
    """:func:`hp_fsdp.fully_shard`, which says what the arguments mean.

    Also taken: ``mixed_precision`` for ``mp_policy``; ``overlap=False``: nothing is gathered ahead (by default the next unit is
    gathered beside the present one's computation); ``scale_factor`` for ``factor`` of ``set_gradient_scaling_factor`` of the modules
    sharded here. TypeError for both spellings of an argument, ValueError for an ``overlap`` that is no bool.
    """
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap must be True or False, got {overlap!r}")
    sharded = hp_fsdp.fully_shard(module, mesh, **_respelled("fully_shard", options))
    for each in sharded if isinstance(sharded, (list, tuple)) else [sharded]:
        if not isinstance(each, hp_fsdp.HSDPModule):
            continue  # of a list: inside of another of its modules
        if not overlap:
            each.set_modules_to_forward_prefetch([])
            each.set_modules_to_backward_prefetch([])
        _take_other_spellings(each)
    return sharded


def _take_other_spellings(module: Any) -> None:
    own = module.set_gradient_scaling_factor

    @wraps(own)
    def set_gradient_scaling_factor(*args: Any, **given: Any) -> None:
        own(*args, **_respelled("set_gradient_scaling_factor", given))

    object.__setattr__(module, "set_gradient_scaling_factor", set_gradient_scaling_factor)
