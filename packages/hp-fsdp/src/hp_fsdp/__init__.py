"""Fully sharded data parallel training.

Read in this order: :mod:`api` (the face), :mod:`layout` and :mod:`buffer` (where shards lie), :mod:`parameter`, :mod:`owner`,
:mod:`marks` and :mod:`origin` (what one is, sharded and whole), :mod:`faces` (what stands in their places), :mod:`whole`,
:mod:`replicated`, :mod:`extension`, :mod:`lines`, :mod:`reduce` and :mod:`reductions` (what travels; of DTensors that stay as they
are :mod:`summands` and :mod:`summation`), :mod:`streams` (where), :mod:`unit_parameters` and :mod:`unit` (the states;
:mod:`unit_names` calls them), :mod:`runtime`, :mod:`roots`, :mod:`backward_end`, :mod:`gradient_listening`, :mod:`order`,
:mod:`hooks`, :mod:`inputs`, :mod:`outputs`, :mod:`nodes` and :mod:`parts` (when), :mod:`module`, :mod:`forward_methods`,
:mod:`sync_stream`, :mod:`state`, :mod:`loading_hooks`, :mod:`optimizer_state`, :mod:`whole_parameters` and :mod:`memory` (what one can ask of a
sharded module).
Importing this package imports no framework.
"""

from typing import TYPE_CHECKING

from hp_fsdp.__about__ import __version__ as __version__
from hp_platform.lazy import attach

if TYPE_CHECKING:
    from hp_fsdp.api import fully_shard as fully_shard
    from hp_fsdp.extension import ParameterExtension as ParameterExtension
    from hp_fsdp.forward_methods import register_forward_method as register_forward_method
    from hp_fsdp.memory import MemoryPlan as MemoryPlan
    from hp_fsdp.memory import UnitMemory as UnitMemory
    from hp_fsdp.memory import memory_plan as memory_plan
    from hp_fsdp.memory_picture import show_memory as show_memory
    from hp_fsdp.module import HSDPModule as HSDPModule
    from hp_fsdp.module import UnshardHandle as UnshardHandle
    from hp_fsdp.optimizer_state import get_optimizer_state_dict as get_optimizer_state_dict
    from hp_fsdp.optimizer_state import set_optimizer_state_dict as set_optimizer_state_dict
    from hp_fsdp.policy import CPUOffloadPolicy as CPUOffloadPolicy
    from hp_fsdp.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hp_fsdp.policy import OffloadPolicy as OffloadPolicy
    from hp_fsdp.state import StateDictOptions as StateDictOptions
    from hp_fsdp.state import get_model_state_dict as get_model_state_dict
    from hp_fsdp.state import set_model_state_dict as set_model_state_dict
    from hp_fsdp.state_likeness import like_parameters as like_parameters
    from hp_fsdp.sync_stream import hsdp_sync_stream as hsdp_sync_stream
    from hp_fsdp.whole_parameters import full_params as full_params

_WHERE = {
    "CPUOffloadPolicy": "policy",
    "HSDPModule": "module",
    "MemoryPlan": "memory",
    "MixedPrecisionPolicy": "policy",
    "OffloadPolicy": "policy",
    "ParameterExtension": "extension",
    "StateDictOptions": "state",
    "UnitMemory": "memory",
    "UnshardHandle": "module",
    "full_params": "whole_parameters",
    "fully_shard": "api",
    "get_model_state_dict": "state",
    "get_optimizer_state_dict": "optimizer_state",
    "hsdp_sync_stream": "sync_stream",
    "like_parameters": "state_likeness",
    "memory_plan": "memory",
    "register_forward_method": "forward_methods",
    "set_model_state_dict": "state",
    "set_optimizer_state_dict": "optimizer_state",
    "show_memory": "memory_picture",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
