"""Optimizers, learning-rate schedules and the clipping of gradient norms, for parameters sharded over ranks.

Importing this package imports no framework.
"""

from typing import TYPE_CHECKING

from hp_optim.__about__ import __version__ as __version__
from hp_platform.lazy import attach

if TYPE_CHECKING:
    from hp_optim.adamw.native import AdamW as AdamW
    from hp_optim.chain.chained_optimizer import ChainedOptimizer as ChainedOptimizer
    from hp_optim.chain.hyper_optimizer import get_hyper_optimizer as get_hyper_optimizer
    from hp_optim.chain.routing import route_parameters as route_parameters
    from hp_optim.chain.routing import show_routing as show_routing
    from hp_optim.clip.norms import clip_grad_norm_ as clip_grad_norm_
    from hp_optim.clip.norms import get_grad_norm as get_grad_norm
    from hp_optim.muon.native import Muon as Muon
    from hp_optim.muon.sinkhorn import sinkhorn as sinkhorn
    from hp_optim.schedule.container import LRSchedulersContainer as LRSchedulersContainer
    from hp_optim.schedule.factory import get_hyper_lr_scheduler as get_hyper_lr_scheduler

_WHERE = {
    "AdamW": "adamw.native",
    "ChainedOptimizer": "chain.chained_optimizer",
    "LRSchedulersContainer": "schedule.container",
    "Muon": "muon.native",
    "clip_grad_norm_": "clip.norms",
    "get_grad_norm": "clip.norms",
    "get_hyper_lr_scheduler": "schedule.factory",
    "get_hyper_optimizer": "chain.hyper_optimizer",
    "route_parameters": "chain.routing",
    "show_routing": "chain.routing",
    "sinkhorn": "muon.sinkhorn",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
