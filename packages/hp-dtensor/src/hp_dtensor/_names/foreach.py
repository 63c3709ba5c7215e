"""Functions of torch on lists of tensors. They have no rules: see :mod:`hp_dtensor.foreach`."""

from typing import Final

ELEMENTWISE: Final = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor frac lerp
    lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc
    zero
"""
"""``torch._foreach_NAME`` and ``torch._foreach_NAME_``."""

FUSED: Final = "adam adamw sgd adagrad"
"""``torch._fused_NAME_``: one step of an optimizer on lists of parameters, gradients and states."""
