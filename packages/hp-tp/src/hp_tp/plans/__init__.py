"""Plans made from what the parts of a model are called.

Read in this order: :mod:`names` (the usual ones), :mod:`parts`, :mod:`weights`, :mod:`heads` and :mod:`anatomy` (what the parts of a
model are), :mod:`recipes` (which style a part gets), :mod:`planner` (the face), :mod:`parallel_plan` (what it gives); and the
styles that plans need besides those of :mod:`hp_tp.styles`: :mod:`overriding`, :mod:`replicated`, :mod:`attention`, :mod:`doors`, :mod:`experts`.
"""

from hp_tp.plans.attention import PrepareAttention as PrepareAttention
from hp_tp.plans.doors import PrepareHidden as PrepareHidden
from hp_tp.plans.doors import PrepareMixture as PrepareMixture
from hp_tp.plans.doors import PrepareModel as PrepareModel
from hp_tp.plans.experts import StackedExperts as StackedExperts
from hp_tp.plans.parallel_plan import ParallelPlan as ParallelPlan
from hp_tp.plans.planner import plan_for as plan_for
from hp_tp.plans.replicated import Replicated as Replicated

__all__ = [
    "ParallelPlan",
    "PrepareAttention",
    "PrepareHidden",
    "PrepareMixture",
    "PrepareModel",
    "Replicated",
    "StackedExperts",
    "plan_for",
]
