"""hp-dtensor: sharded tensors that give the unsharded program's numbers.

Read in this order: :mod:`placements`, :mod:`chunk`, :mod:`cuts` and :mod:`spec` (where the pieces lie), :mod:`aliases` and
:mod:`layout` (the other notation), :mod:`conversions`, :mod:`reductions`, :mod:`planning` and :mod:`redistribution` (how they
move), :mod:`dtensor` and :mod:`creation` (the public class), :mod:`dispatch` and
:mod:`marks` (how operations run), :mod:`rules` (what they do with placements), :mod:`rule_checker`.
Importing this package imports no framework.
"""

from typing import TYPE_CHECKING

from hp_dtensor.__about__ import __version__ as __version__
from hp_platform.lazy import attach

if TYPE_CHECKING:
    from hp_dtensor import random as random
    from hp_dtensor.across_meshes import transfer as transfer
    from hp_dtensor.checkpoint.background import SaveHandle as SaveHandle
    from hp_dtensor.checkpoint.background import async_save as async_save
    from hp_dtensor.checkpoint.huggingface import load_safetensors as load_safetensors
    from hp_dtensor.checkpoint.huggingface import save_safetensors as save_safetensors
    from hp_dtensor.checkpoint.loading import load as load
    from hp_dtensor.checkpoint.report import LoadReport as LoadReport
    from hp_dtensor.checkpoint.saving import save as save
    from hp_dtensor.creation import distribute_tensor as distribute_tensor
    from hp_dtensor.dfunction import DFunction as DFunction
    from hp_dtensor.distributed_module import distribute_module as distribute_module
    from hp_dtensor.factories import arange as arange
    from hp_dtensor.factories import empty as empty
    from hp_dtensor.factories import full as full
    from hp_dtensor.factories import ones as ones
    from hp_dtensor.factories import rand as rand
    from hp_dtensor.factories import randn as randn
    from hp_dtensor.factories import zeros as zeros
    from hp_dtensor.init.contexts import init_empty_weights as init_empty_weights
    from hp_dtensor.init.contexts import init_on_device as init_on_device
    from hp_dtensor.init.parameters import init_parameters as init_parameters
    from hp_dtensor.layout import Layout as Layout
    from hp_dtensor.native import DTensor as DTensor
    from hp_dtensor.pickling import rebuild_dtensor as rebuild_dtensor
    from hp_dtensor.picture import show as show
    from hp_dtensor.placements import Partial as Partial
    from hp_dtensor.placements import Placement as Placement
    from hp_dtensor.placements import RaggedShard as RaggedShard
    from hp_dtensor.placements import Replicate as Replicate
    from hp_dtensor.placements import Shard as Shard
    from hp_dtensor.placements import StridedShard as StridedShard
    from hp_dtensor.random import manual_seed as manual_seed
    from hp_dtensor.redistribution_plan import redistribute_plan as redistribute_plan
    from hp_dtensor.sharded_function import custom_shard as custom_shard
    from hp_dtensor.sharded_module import shard_module as shard_module
    from hp_dtensor.sharding_plan import ShardingPlan as ShardingPlan
    from hp_dtensor.skip_dispatch import SkipDTensorDispatch as SkipDTensorDispatch
    from hp_dtensor.spmd_check.block import check_spmd as check_spmd
    from hp_dtensor.styles.parallel_style import ParallelStyle as ParallelStyle
    from hp_dtensor.styles.parallelized_module import parallelize_module as parallelize_module
    from hp_dtensor.styles.prepare_module import PrepareModuleInput as PrepareModuleInput
    from hp_dtensor.styles.prepare_module import PrepareModuleInputOutput as PrepareModuleInputOutput
    from hp_dtensor.styles.prepare_module import PrepareModuleOutput as PrepareModuleOutput
    from hp_dtensor.value_and_grad import parallelize_value_and_grad as parallelize_value_and_grad

_WHERE = {
    "DFunction": "dfunction",
    "DTensor": "native",
    "Layout": "layout",
    "LoadReport": "checkpoint.report",
    "ParallelStyle": "styles.parallel_style",
    "Partial": "placements",
    "Placement": "placements",
    "PrepareModuleInput": "styles.prepare_module",
    "PrepareModuleInputOutput": "styles.prepare_module",
    "PrepareModuleOutput": "styles.prepare_module",
    "RaggedShard": "placements",
    "Replicate": "placements",
    "SaveHandle": "checkpoint.background",
    "Shard": "placements",
    "ShardingPlan": "sharding_plan",
    "SkipDTensorDispatch": "skip_dispatch",
    "StridedShard": "placements",
    "arange": "factories",
    "async_save": "checkpoint.background",
    "check_spmd": "spmd_check.block",
    "custom_shard": "sharded_function",
    "distribute_module": "distributed_module",
    "distribute_tensor": "creation",
    "empty": "factories",
    "full": "factories",
    "init_empty_weights": "init.contexts",
    "init_on_device": "init.contexts",
    "init_parameters": "init.parameters",
    "load": "checkpoint.loading",
    "load_safetensors": "checkpoint.huggingface",
    "manual_seed": "random",
    "ones": "factories",
    "parallelize_module": "styles.parallelized_module",
    "parallelize_value_and_grad": "value_and_grad",
    "rand": "factories",
    "randn": "factories",
    "random": ".",
    "rebuild_dtensor": "pickling",
    "redistribute_plan": "redistribution_plan",
    "save": "checkpoint.saving",
    "save_safetensors": "checkpoint.huggingface",
    "shard_module": "sharded_module",
    "show": "picture",
    "transfer": "across_meshes",
    "zeros": "factories",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
