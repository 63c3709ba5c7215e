"""Whether torch's checkpointing runs a forward again, and how it casts by itself."""

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


def test_casts_of_autocast_are_brought_back():
    x, platform = torch.ones(2, 2), get_platform()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        as_then = platform.autocast_state()
    with as_then():
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        platform.autocast_state()(),
        torch.autocast("cpu", enabled=False),
    ):
        assert (x @ x).dtype is torch.float32
