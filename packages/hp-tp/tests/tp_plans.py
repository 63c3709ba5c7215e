"""The plans of the models of :mod:`tp_models`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hp_dtensor import Replicate, Shard
from hp_tp import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config


def block_plan(
    config: Config,
    tp: int,
    *,
    sequence: bool = False,
    use_local: bool = True,
    is_plain: bool = False,
    prefix: str = "",
) -> dict[str, Any]:
    """The plan of one layer whose input and output are whole, or with ``sequence`` cut along dim 1.

    ``use_local`` False: the residual stream is made of DTensors, as it must be if the length does not divide. ``is_plain``: there are
    no DTensors at all among the activations, as it must be in compiled layers.
    """
    out = {"output_layouts": Shard(1) if sequence else Replicate(), "use_local_output": use_local}
    given: dict[str, Any] = {"input_layouts": Shard(1)} if is_plain and sequence else {}
    kv: dict[str, Any] = {"heads": config.kv_heads}
    if config.kv_heads % tp:
        kv = {"heads": config.kv_heads, "query_heads": config.heads, "replicate_kv": True}
    plan: dict[str, Any] = {
        "attention.q": ColwiseParallel(heads=config.heads, **given),
        "attention.[kv]": ColwiseParallel(**kv, **given),
        "attention.o": RowwiseParallel(heads=config.heads, **out),
        "mlp.gate": ColwiseParallel(**given),
        "mlp.up": ColwiseParallel(**given),
        "mlp.down": RowwiseParallel(**out),
    }
    if sequence:
        plan["norm[12]"] = norm_style(is_plain)
    return {prefix + name: style for name, style in plan.items()}


def norm_style(is_plain: bool) -> SequenceParallel:
    return SequenceParallel(use_local_output=is_plain, local=is_plain or None)


def model_plan(
    config: Config,
    tp: int,
    *,
    sequence: bool = False,
    use_local: bool = True,
    is_plain: bool = False,
    logits: Any = None,
) -> dict[str, Any]:
    """The plan of a whole model; ``logits``: how they come out, whole and plain unless said otherwise."""
    first = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(output_layouts=first, use_local_output=use_local),
        **block_plan(
            config, tp, sequence=sequence, use_local=use_local, is_plain=is_plain, prefix="layers.*."
        ),
        "head": ColwiseParallel(
            input_layouts=first if is_plain else None,
            output_layouts=Replicate() if logits is None else logits,
            use_local_output=logits is None,
        ),
    }
    if sequence:
        plan["norm"] = norm_style(is_plain)
    return plan
