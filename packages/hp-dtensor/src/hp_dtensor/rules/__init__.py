"""The rules by family; importing this package enters all of them in :data:`hp_dtensor.rules.registry.RULES`."""

from hp_dtensor.rules import (
    attention,
    convolution,
    einsum,
    elementwise,
    linalg,
    matmul,
    pooling,
    reduction,
    view,
)
from hp_dtensor.rules.registry import RULES, Outcome, Result, Rule, rule

__all__ = [
    "RULES",
    "Outcome",
    "Result",
    "Rule",
    "attention",
    "convolution",
    "einsum",
    "elementwise",
    "linalg",
    "matmul",
    "pooling",
    "reduction",
    "rule",
    "view",
]
