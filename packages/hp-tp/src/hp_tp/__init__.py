"""Tensor parallel training: styles that cut the layers of a model over the ranks of a mesh dim, and losses over cut classes.

Read :mod:`styles` (over one mesh dim) first: what a style does to a module, and what happens at the module's door; then
:mod:`overlap` (products beside communication), :mod:`two_dim` (over two), and :mod:`loss` (over cut classes). Importing this
package imports no framework.
"""

from typing import TYPE_CHECKING

from hp_platform.lazy import attach
from hp_tp.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from hp_dtensor.styles.parallel_style import ParallelStyle as ParallelStyle
    from hp_dtensor.styles.parallelized_module import parallelize_module as parallelize_module
    from hp_dtensor.styles.prepare_module import PrepareModuleInput as PrepareModuleInput
    from hp_dtensor.styles.prepare_module import PrepareModuleInputOutput as PrepareModuleInputOutput
    from hp_dtensor.styles.prepare_module import PrepareModuleOutput as PrepareModuleOutput
    from hp_tp.dropout import DropoutParallel as DropoutParallel
    from hp_tp.loss.context import loss_parallel as loss_parallel
    from hp_tp.loss.linear import linear_cross_entropy as linear_cross_entropy
    from hp_tp.loss.vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from hp_tp.overlap.policy import OverlapPolicy as OverlapPolicy
    from hp_tp.picture.shown_plan import show_plan as show_plan
    from hp_tp.plans.attention import PrepareAttention as PrepareAttention
    from hp_tp.plans.doors import PrepareHidden as PrepareHidden
    from hp_tp.plans.doors import PrepareMixture as PrepareMixture
    from hp_tp.plans.doors import PrepareModel as PrepareModel
    from hp_tp.plans.experts import StackedExperts as StackedExperts
    from hp_tp.plans.parallel_plan import ParallelPlan as ParallelPlan
    from hp_tp.plans.planner import plan_for as plan_for
    from hp_tp.plans.replicated import Replicated as Replicated
    from hp_tp.styles.colwise import ColwiseParallel as ColwiseParallel
    from hp_tp.styles.compiled import compile_block as compile_block
    from hp_tp.styles.cuts import ModuleCuts as ModuleCuts
    from hp_tp.styles.description import describe as describe
    from hp_tp.styles.rowwise import RowwiseParallel as RowwiseParallel
    from hp_tp.styles.sequence import SequenceParallel as SequenceParallel
    from hp_tp.two_dim.linear import Linear2DParallel as Linear2DParallel

_WHERE = {
    "ColwiseParallel": "styles.colwise",
    "DropoutParallel": "dropout",
    "Linear2DParallel": "two_dim.linear",
    "ModuleCuts": "styles.cuts",
    "OverlapPolicy": "overlap.policy",
    "ParallelPlan": "plans.parallel_plan",
    "ParallelStyle": "hp_dtensor",
    "PrepareAttention": "plans.attention",
    "PrepareHidden": "plans.doors",
    "PrepareMixture": "plans.doors",
    "PrepareModel": "plans.doors",
    "PrepareModuleInput": "hp_dtensor",
    "PrepareModuleInputOutput": "hp_dtensor",
    "PrepareModuleOutput": "hp_dtensor",
    "Replicated": "plans.replicated",
    "RowwiseParallel": "styles.rowwise",
    "SequenceParallel": "styles.sequence",
    "StackedExperts": "plans.experts",
    "compile_block": "styles.compiled",
    "describe": "styles.description",
    "linear_cross_entropy": "loss.linear",
    "loss_parallel": "loss.context",
    "parallelize_module": "hp_dtensor",
    "plan_for": "plans.planner",
    "show_plan": "picture.shown_plan",
    "vocab_parallel_cross_entropy": "loss.vocab_parallel",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
