"""Activation checkpointing and swap: less memory for what backward needs, for more time.

Read :mod:`checkpointing` first: what is computed again. Importing this package imports no framework.
"""

from typing import TYPE_CHECKING

from hp_platform.lazy import attach
from hp_recompute.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from hp_recompute.checkpointing.calls import checkpoint as checkpoint
    from hp_recompute.checkpointing.errors import CheckpointError as CheckpointError
    from hp_recompute.checkpointing.kept_collectives import keep_collectives_policy as keep_collectives_policy
    from hp_recompute.checkpointing.policies import CheckpointPolicy as CheckpointPolicy
    from hp_recompute.checkpointing.wrappers import checkpoint_exclude_wrapper as checkpoint_exclude_wrapper
    from hp_recompute.checkpointing.wrappers import checkpoint_wrapper as checkpoint_wrapper
    from hp_recompute.swapping.budget import BudgetPlan as BudgetPlan
    from hp_recompute.swapping.calls import swap as swap
    from hp_recompute.swapping.manager import SwapManager as SwapManager
    from hp_recompute.swapping.wrappers import swap_tensor_wrapper as swap_tensor_wrapper
    from hp_recompute.swapping.wrappers import swap_wrapper as swap_wrapper

_WHERE = {
    "BudgetPlan": "swapping.budget",
    "CheckpointError": "checkpointing.errors",
    "CheckpointPolicy": "checkpointing.policies",
    "SwapManager": "swapping.manager",
    "checkpoint": "checkpointing.calls",
    "checkpoint_exclude_wrapper": "checkpointing.wrappers",
    "checkpoint_wrapper": "checkpointing.wrappers",
    "keep_collectives_policy": "checkpointing.kept_collectives",
    "swap": "swapping.calls",
    "swap_tensor_wrapper": "swapping.wrappers",
    "swap_wrapper": "swapping.wrappers",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
