"""Parallel styles: what a style is, how a plan of styles is applied, and the styles that only move inputs and outputs."""

from hp_dtensor.styles.parallel_style import ParallelStyle as ParallelStyle
from hp_dtensor.styles.parallelized_module import parallelize_module as parallelize_module
from hp_dtensor.styles.prepare_module import PrepareModuleInput as PrepareModuleInput
from hp_dtensor.styles.prepare_module import PrepareModuleInputOutput as PrepareModuleInputOutput
from hp_dtensor.styles.prepare_module import PrepareModuleOutput as PrepareModuleOutput

__all__ = [
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "parallelize_module",
]
