"""``get_hyper_lr_scheduler``: one schedule for all optimizers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_optim.schedule.config import ScheduleConfig
from hp_optim.schedule.container import LRSchedulersContainer
from hp_optim.schedule.lr_scheduler import LRScheduler, groups_of, keep_initial_rates


def get_hyper_lr_scheduler(
    optimizer: Any,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    decay_style: str = "cosine",
    lr: float = 1e-4,
    lr_min: float = 1e-7,
    lr_start: float = 0.0,
    lr_decay_ratio: float = 1.0,
    wsd_decay_steps: int | None = None,
    lr_wsd_decay_style: str = "exponential",
    override_opt_param_scheduler: bool = False,
) -> LRSchedulersContainer:
    """Warm-up and decay of the learning rates of ``optimizer``; the rates of step 0 are set at once.

    Every group's initial rate is multiplied by one number per step, which follows from ``lr``, ``lr_min`` and ``lr_start`` as
    ratios, so groups with other rates keep their proportion. With ``s`` the step, ``W`` the steps of warm-up and
    ``m = lr_min / lr`` it is:

    * ``s < W``: ``(lr_start + (lr - lr_start) s / W) / lr``
    * ``constant``: 1, for ever.
    * ``linear``: ``max(m, 1 - r)``, ``cosine``: ``(1 + cos(pi r)) / 2 (1 - m) + m``, where ``r`` goes from 0 at ``W`` to 1 at
      ``int(total_steps lr_decay_ratio)``; after that ``m``.
    * ``WSD``: 1 until ``wsd_decay_steps`` before ``total_steps``, then, with ``x`` from 0 to 1, ``c(x) (1 - m) + m``: ``linear``
      ``1 - x``, ``cosine`` ``(1 + cos(pi x)) / 2``, ``exponential`` ``2 * 0.5**x - 1``, ``minus_sqrt`` ``1 - sqrt(x)``; after
      ``total_steps`` ``m``.

    Args:
        optimizer: a :class:`hp_optim.ChainedOptimizer`, one optimizer, a list of them, or a dict from names to optimizers: any
            objects with ``param_groups``. The names (of one optimizer its class in lower case) are the keys of the state.
        total_steps: optimizer steps of the training.
        warmup_steps: steps of warm-up; if not above 0, ``int(total_steps * warmup_ratio)``.
        decay_style: ``"constant"``, ``"linear"``, ``"cosine"`` or ``"WSD"`` (in any case).
        lr, lr_min, lr_start: the rate at the peak, at the end, and at the start of the warm-up.
        lr_decay_ratio: at which part of the training the decay has ended; not for WSD.
        override_opt_param_scheduler: say nothing when a state is loaded that was saved with another schedule. Which one counts
            is the present one in any case.

    ValueError for unknown styles, ``lr_min`` below 0 or above ``lr``, ``total_steps`` not above 0, a warm-up that takes all of it, WSD
    without ``wsd_decay_steps`` or with more than ``total_steps``. No communication.
    Source: the schedules of Megatron-LM (``OptimizerParamScheduler``); papers beside the formulas in :mod:`hp_optim.schedule.formulas`.
    """
    if not isinstance(override_opt_param_scheduler, bool):
        raise ValueError(
            f"override_opt_param_scheduler is True or False, got {override_opt_param_scheduler!r}"
        )
    config = ScheduleConfig(
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        warmup_ratio=warmup_ratio,
        decay_style=decay_style,
        lr=lr,
        lr_min=lr_min,
        lr_start=lr_start,
        lr_decay_ratio=lr_decay_ratio,
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=lr_wsd_decay_style,
    )
    named = _named(optimizer)
    # Of all of them before the first one's rates are set: they may share a tensor.
    keep_initial_rates([group for each in named.values() for group in groups_of(each)])
    return LRSchedulersContainer(
        {
            name: LRScheduler(each, config, override=override_opt_param_scheduler)
            for name, each in named.items()
        }
    )


def _named(optimizer: Any) -> dict[str, Any]:
    """Optimizers by name. ValueError for one that is given twice."""
    found = getattr(optimizer, "optimizers_dict", optimizer)
    if isinstance(found, (list, tuple)):
        names = [type(each).__name__.lower() for each in found]
        found = {
            name if names.count(name) == 1 else f"{name}_{names[:place].count(name)}": each
            for place, (name, each) in enumerate(zip(names, found, strict=True))
        }
    elif not isinstance(found, Mapping):
        found = {type(found).__name__.lower(): found}
    if len({id(each) for each in found.values()}) < len(found):
        raise ValueError(
            f"an optimizer is given twice among {', '.join(map(repr, found))}, so its rates would be set twice: give every one once"
        )
    return dict(found)
