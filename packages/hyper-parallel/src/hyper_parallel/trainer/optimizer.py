"""The optimizer of a job: AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest; and its schedule."""

from __future__ import annotations

from typing import Any

from hp_optim import get_hyper_lr_scheduler, get_hyper_optimizer, route_parameters
from hp_platform import get_platform
from hyper_parallel.trainer.options import Options

BETAS = (0.9, 0.95)
DECAY = 0.1
"""Of matrices; vectors (the weights of norms) do not decay."""
WARMUP = 10
"""The first tenth of the steps."""
LAST = 0.1
"""Share of the peak rate at the end."""


def make_optimizer(model: Any, options: Options) -> Any:
    """A chain of one or two optimizers over the sharded parameters of ``model``.

    Muon's updates have the size of AdamW's, so both take the rate of ``--lr``. In a job of 32 or 64 bits it iterates in the job's
    dtype, so that runs on any number of processes stay equal to rounding; in 16 bits as it does by itself.
    """
    named = dict(get_platform().named_parameters(model))
    muon = set(route_parameters(model).names("muon")) if options.optimizer == "muon" else set()
    rest = {name: parameter for name, parameter in named.items() if name not in muon}
    groups = [
        {"params": [p for p in rest.values() if p.ndim > 1]},
        {"params": [p for p in rest.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    dtype = options.dtype if options.dtype in ("float32", "float64") else None
    return get_hyper_optimizer(
        model,
        [(name, named[name]) for name in named if name in muon],
        groups,
        muon_kwargs={"lr": options.lr, "weight_decay": DECAY, "ns_dtype": dtype},
        adamw_kwargs={"lr": options.lr, "weight_decay": DECAY, "betas": BETAS},
    )


def make_schedule(optimizer: Any, options: Options) -> Any:
    """Linear warm-up over the first tenth, then half a cosine down to a tenth of the peak."""
    warmup = options.steps // WARMUP
    return get_hyper_lr_scheduler(
        optimizer,
        options.steps,
        warmup_steps=warmup,
        lr=options.lr,
        lr_min=LAST * options.lr,
        lr_start=options.lr / max(1, warmup),
        # A run that is resumed follows the --steps and the --lr that it was resumed with.
        override_opt_param_scheduler=True,
    )
