"""Whether torch's checkpointing runs a forward again."""

import torch
from torch.utils.checkpoint import checkpoint

from hp_platform import get_platform


def test_the_second_forward_of_a_checkpoint_is_seen():
    seen = []

    def forward(x):
        seen.append(get_platform().is_recomputing())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not get_platform().is_recomputing()
