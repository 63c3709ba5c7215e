"""hyper-parallel: everything of the house under one name.

Each public name is loaded from its package at first use; importing this package imports no framework. The packages can be
installed and imported alone as well. ``hyper-parallel train`` runs the reference trainer (:mod:`hyper_parallel.trainer`).
"""

from typing import TYPE_CHECKING

from hp_platform.lazy import attach
from hyper_parallel.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from hp_dtensor import DFunction as DFunction
    from hp_dtensor import DTensor as DTensor
    from hp_dtensor import Layout as Layout
    from hp_dtensor import LoadReport as LoadReport
    from hp_dtensor import ParallelStyle as ParallelStyle
    from hp_dtensor import Partial as Partial
    from hp_dtensor import Placement as Placement
    from hp_dtensor import PrepareModuleInput as PrepareModuleInput
    from hp_dtensor import PrepareModuleInputOutput as PrepareModuleInputOutput
    from hp_dtensor import PrepareModuleOutput as PrepareModuleOutput
    from hp_dtensor import RaggedShard as RaggedShard
    from hp_dtensor import Replicate as Replicate
    from hp_dtensor import SaveHandle as SaveHandle
    from hp_dtensor import Shard as Shard
    from hp_dtensor import ShardingPlan as ShardingPlan
    from hp_dtensor import SkipDTensorDispatch as SkipDTensorDispatch
    from hp_dtensor import StridedShard as StridedShard
    from hp_dtensor import arange as arange
    from hp_dtensor import async_save as async_save
    from hp_dtensor import check_spmd as check_spmd
    from hp_dtensor import custom_shard as custom_shard
    from hp_dtensor import distribute_module as distribute_module
    from hp_dtensor import distribute_tensor as distribute_tensor
    from hp_dtensor import empty as empty
    from hp_dtensor import full as full
    from hp_dtensor import init_empty_weights as init_empty_weights
    from hp_dtensor import init_on_device as init_on_device
    from hp_dtensor import init_parameters as init_parameters
    from hp_dtensor import load as load
    from hp_dtensor import load_safetensors as load_safetensors
    from hp_dtensor import manual_seed as manual_seed
    from hp_dtensor import ones as ones
    from hp_dtensor import parallelize_module as parallelize_module
    from hp_dtensor import parallelize_value_and_grad as parallelize_value_and_grad
    from hp_dtensor import rand as rand
    from hp_dtensor import randn as randn
    from hp_dtensor import random as random
    from hp_dtensor import rebuild_dtensor as rebuild_dtensor
    from hp_dtensor import redistribute_plan as redistribute_plan
    from hp_dtensor import save as save
    from hp_dtensor import save_safetensors as save_safetensors
    from hp_dtensor import shard_module as shard_module
    from hp_dtensor import show as show
    from hp_dtensor import transfer as transfer
    from hp_dtensor import zeros as zeros
    from hp_fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from hp_fsdp import HSDPModule as HSDPModule
    from hp_fsdp import MemoryPlan as MemoryPlan
    from hp_fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hp_fsdp import OffloadPolicy as OffloadPolicy
    from hp_fsdp import ParameterExtension as ParameterExtension
    from hp_fsdp import StateDictOptions as StateDictOptions
    from hp_fsdp import UnitMemory as UnitMemory
    from hp_fsdp import UnshardHandle as UnshardHandle
    from hp_fsdp import full_params as full_params
    from hp_fsdp import get_model_state_dict as get_model_state_dict
    from hp_fsdp import get_optimizer_state_dict as get_optimizer_state_dict
    from hp_fsdp import hsdp_sync_stream as hsdp_sync_stream
    from hp_fsdp import like_parameters as like_parameters
    from hp_fsdp import memory_plan as memory_plan
    from hp_fsdp import register_forward_method as register_forward_method
    from hp_fsdp import set_model_state_dict as set_model_state_dict
    from hp_fsdp import set_optimizer_state_dict as set_optimizer_state_dict
    from hp_fsdp import show_memory as show_memory
    from hp_optim import AdamW as AdamW
    from hp_optim import ChainedOptimizer as ChainedOptimizer
    from hp_optim import LRSchedulersContainer as LRSchedulersContainer
    from hp_optim import Muon as Muon
    from hp_optim import clip_grad_norm_ as clip_grad_norm_
    from hp_optim import get_grad_norm as get_grad_norm
    from hp_optim import get_hyper_lr_scheduler as get_hyper_lr_scheduler
    from hp_optim import get_hyper_optimizer as get_hyper_optimizer
    from hp_optim import route_parameters as route_parameters
    from hp_optim import show_routing as show_routing
    from hp_optim import sinkhorn as sinkhorn
    from hp_platform import DeviceMesh as DeviceMesh
    from hp_platform import destroy_process_group as destroy_process_group
    from hp_platform import get_backend as get_backend
    from hp_platform import get_current_mesh as get_current_mesh
    from hp_platform import get_group_local_rank as get_group_local_rank
    from hp_platform import get_platform as get_platform
    from hp_platform import get_process_group_ranks as get_process_group_ranks
    from hp_platform import init_device_mesh as init_device_mesh
    from hp_platform import init_process_group as init_process_group
    from hp_platform import mark_created_groups as mark_created_groups
    from hp_platform import split_group as split_group
    from hp_recompute import BudgetPlan as BudgetPlan
    from hp_recompute import CheckpointError as CheckpointError
    from hp_recompute import CheckpointPolicy as CheckpointPolicy
    from hp_recompute import SwapManager as SwapManager
    from hp_recompute import checkpoint as checkpoint
    from hp_recompute import checkpoint_exclude_wrapper as checkpoint_exclude_wrapper
    from hp_recompute import checkpoint_wrapper as checkpoint_wrapper
    from hp_recompute import keep_collectives_policy as keep_collectives_policy
    from hp_recompute import swap as swap
    from hp_recompute import swap_tensor_wrapper as swap_tensor_wrapper
    from hp_recompute import swap_wrapper as swap_wrapper
    from hp_tp import ColwiseParallel as ColwiseParallel
    from hp_tp import DropoutParallel as DropoutParallel
    from hp_tp import Linear2DParallel as Linear2DParallel
    from hp_tp import ModuleCuts as ModuleCuts
    from hp_tp import OverlapPolicy as OverlapPolicy
    from hp_tp import ParallelPlan as ParallelPlan
    from hp_tp import PrepareAttention as PrepareAttention
    from hp_tp import PrepareHidden as PrepareHidden
    from hp_tp import PrepareMixture as PrepareMixture
    from hp_tp import PrepareModel as PrepareModel
    from hp_tp import Replicated as Replicated
    from hp_tp import RowwiseParallel as RowwiseParallel
    from hp_tp import SequenceParallel as SequenceParallel
    from hp_tp import StackedExperts as StackedExperts
    from hp_tp import compile_block as compile_block
    from hp_tp import describe as describe
    from hp_tp import linear_cross_entropy as linear_cross_entropy
    from hp_tp import loss_parallel as loss_parallel
    from hp_tp import plan_for as plan_for
    from hp_tp import show_plan as show_plan
    from hp_tp import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from hyper_parallel._compat import fully_shard as fully_shard


_WHERE = {
    "AdamW": "hp_optim",
    "CPUOffloadPolicy": "hp_fsdp",
    "ChainedOptimizer": "hp_optim",
    "CheckpointError": "hp_recompute",
    "CheckpointPolicy": "hp_recompute",
    "ColwiseParallel": "hp_tp",
    "DFunction": "hp_dtensor",
    "DTensor": "hp_dtensor",
    "DeviceMesh": "hp_platform",
    "DropoutParallel": "hp_tp",
    "HSDPModule": "hp_fsdp",
    "LRSchedulersContainer": "hp_optim",
    "Layout": "hp_dtensor",
    "Linear2DParallel": "hp_tp",
    "LoadReport": "hp_dtensor",
    "MemoryPlan": "hp_fsdp",
    "MixedPrecisionPolicy": "hp_fsdp",
    "ModuleCuts": "hp_tp",
    "Muon": "hp_optim",
    "OffloadPolicy": "hp_fsdp",
    "OverlapPolicy": "hp_tp",
    "ParallelPlan": "hp_tp",
    "ParallelStyle": "hp_dtensor",
    "ParameterExtension": "hp_fsdp",
    "Partial": "hp_dtensor",
    "Placement": "hp_dtensor",
    "PrepareAttention": "hp_tp",
    "PrepareHidden": "hp_tp",
    "PrepareMixture": "hp_tp",
    "PrepareModel": "hp_tp",
    "PrepareModuleInput": "hp_dtensor",
    "PrepareModuleInputOutput": "hp_dtensor",
    "PrepareModuleOutput": "hp_dtensor",
    "RaggedShard": "hp_dtensor",
    "Replicate": "hp_dtensor",
    "Replicated": "hp_tp",
    "RowwiseParallel": "hp_tp",
    "SaveHandle": "hp_dtensor",
    "SequenceParallel": "hp_tp",
    "Shard": "hp_dtensor",
    "ShardingPlan": "hp_dtensor",
    "SkipDTensorDispatch": "hp_dtensor",
    "StackedExperts": "hp_tp",
    "StateDictOptions": "hp_fsdp",
    "StridedShard": "hp_dtensor",
    "UnitMemory": "hp_fsdp",
    "UnshardHandle": "hp_fsdp",
    "arange": "hp_dtensor",
    "async_save": "hp_dtensor",
    "check_spmd": "hp_dtensor",
    "checkpoint": "hp_recompute",
    "checkpoint_exclude_wrapper": "hp_recompute",
    "checkpoint_wrapper": "hp_recompute",
    "keep_collectives_policy": "hp_recompute",
    "swap": "hp_recompute",
    "BudgetPlan": "hp_recompute",
    "swap_tensor_wrapper": "hp_recompute",
    "swap_wrapper": "hp_recompute",
    "SwapManager": "hp_recompute",
    "clip_grad_norm_": "hp_optim",
    "compile_block": "hp_tp",
    "custom_shard": "hp_dtensor",
    "describe": "hp_tp",
    "destroy_process_group": "hp_platform",
    "distribute_module": "hp_dtensor",
    "distribute_tensor": "hp_dtensor",
    "empty": "hp_dtensor",
    "full": "hp_dtensor",
    "full_params": "hp_fsdp",
    "fully_shard": "_compat",
    "get_backend": "hp_platform",
    "get_current_mesh": "hp_platform",
    "get_grad_norm": "hp_optim",
    "get_group_local_rank": "hp_platform",
    "get_hyper_lr_scheduler": "hp_optim",
    "get_hyper_optimizer": "hp_optim",
    "get_model_state_dict": "hp_fsdp",
    "get_optimizer_state_dict": "hp_fsdp",
    "get_platform": "hp_platform",
    "get_process_group_ranks": "hp_platform",
    "hsdp_sync_stream": "hp_fsdp",
    "init_device_mesh": "hp_platform",
    "init_empty_weights": "hp_dtensor",
    "init_on_device": "hp_dtensor",
    "init_parameters": "hp_dtensor",
    "init_process_group": "hp_platform",
    "like_parameters": "hp_fsdp",
    "linear_cross_entropy": "hp_tp",
    "load": "hp_dtensor",
    "load_safetensors": "hp_dtensor",
    "loss_parallel": "hp_tp",
    "manual_seed": "hp_dtensor",
    "mark_created_groups": "hp_platform",
    "memory_plan": "hp_fsdp",
    "ones": "hp_dtensor",
    "parallelize_module": "hp_dtensor",
    "parallelize_value_and_grad": "hp_dtensor",
    "plan_for": "hp_tp",
    "rand": "hp_dtensor",
    "randn": "hp_dtensor",
    "random": "hp_dtensor",
    "rebuild_dtensor": "hp_dtensor",
    "redistribute_plan": "hp_dtensor",
    "register_forward_method": "hp_fsdp",
    "route_parameters": "hp_optim",
    "save": "hp_dtensor",
    "save_safetensors": "hp_dtensor",
    "set_model_state_dict": "hp_fsdp",
    "set_optimizer_state_dict": "hp_fsdp",
    "shard_module": "hp_dtensor",
    "show": "hp_dtensor",
    "show_memory": "hp_fsdp",
    "show_plan": "hp_tp",
    "show_routing": "hp_optim",
    "sinkhorn": "hp_optim",
    "split_group": "hp_platform",
    "transfer": "hp_dtensor",
    "vocab_parallel_cross_entropy": "hp_tp",
    "zeros": "hp_dtensor",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
