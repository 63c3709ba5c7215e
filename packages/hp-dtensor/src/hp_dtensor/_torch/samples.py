"""``torch.multinomial``: categories drawn by their weights, equal for every sharding, also of a plain tensor in one process."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor import random
from hp_dtensor.placements import REPLICATE, Shard
from hp_dtensor.rng.places import is_dtensor


def multinomial(
    input: Any,  # noqa: A002 (torch's name)
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    out: Any = None,
) -> Any:
    """Numbers of categories, ``(rows, num_samples)`` or ``(num_samples,)``, by the weights ``(rows, categories)``.

    Without replacement every category gets a waiting time, exponential with its weight as the rate, and the first ones are
    taken: so they come in the order in which they would be drawn one by one. With replacement each uniform number is looked up
    in the running sums. Rows may be cut; weights of a row are joined (an all-gather). One draw from the stream. A category of
    weight 0 is drawn only where no other is left. ValueError for more samples than categories, and for weights with more dims.
    """
    if out is not None:
        raise ValueError("out= of multinomial is not taken: use the result")
    ndim = input.dim()
    if ndim not in (1, 2):
        raise ValueError(
            f"multinomial takes weights (rows, categories) or (categories,), got shape {tuple(input.shape)}"
        )
    count = input.shape[-1]
    if num_samples < 1 or (not replacement and num_samples > count):
        raise ValueError(f"multinomial cannot draw {num_samples} of {count} categories without replacement")
    weights = input.detach()
    if is_dtensor(weights):
        row = Shard(0)
        lies = [p if ndim == 2 and p == row else REPLICATE for p in weights.placements]
        weights = weights.redistribute(placements=lies)
    weights = weights.double()
    if not replacement:
        times = random.exponential_(torch.empty_like(weights), generator=generator)
        return (weights / times).topk(num_samples, -1).indices
    sums = weights.cumsum(-1)
    like = torch.empty_like(weights[..., :1].repeat(*(1,) * (ndim - 1), num_samples))
    drawn = random.uniform_(like, generator=generator) * sums[..., -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp(max=count - 1)


SAMPLERS = {torch.multinomial: multinomial, torch.Tensor.multinomial: multinomial}
"""Function of torch -> what runs instead of it."""
