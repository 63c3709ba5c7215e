"""Reductions, extremes, moments and norms."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "sum": "sum",
    "mean": "mean",
    "nansum": "nansum",
    "nanmean": "nanmean",
    "count_nonzero": "count_nonzero",
    "prod": "prod",
    "any": "any",
    "all": "all",
    "amax": "amax",
    "amin": "amin",
    "aminmax": "aminmax",
    "max": "max",
    "min": "min",
    "argmax": "argmax",
    "argmin": "argmin",
    "var": "var",
    "std": "std",
    "var_mean": "var_mean",
    "std_mean": "std_mean",
    "norm": "norm",
    "vector_norm": "linalg.vector_norm",
    "matrix_norm": "linalg.matrix_norm",
    "linalg_norm": "linalg.norm",
    "logsumexp": "logsumexp",
}

PRIMITIVES: Final[dict[str, str]] = {
    "sum": "SumExt ReduceSum",
    "mean": "MeanExt ReduceMean",
}
"""Those whose arguments are those of the rule; the others end in a refusal that names them."""
