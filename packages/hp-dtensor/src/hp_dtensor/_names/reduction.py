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
    "prod": "ProdExt ReduceProd",
    "nansum": "Nansum",
    "any": "AnyExt ReduceAny Any",
    "all": "AllExt ReduceAll",
    "amax": "ReduceMax AMax",
    "amin": "ReduceMin AMin",
    "max": "Max MaxDim ArgMaxWithValue",
    "min": "Min MinDim ArgMinWithValue",
    "argmax": "ArgMaxExt Argmax",
    "argmin": "ArgMinExt Argmin",
    "logsumexp": "LogSumExp",
    "vector_norm": "LinalgVectorNorm",
    "var": "Var",
    "std": "Std ReduceStd",
    "var_mean": "VarMean",
    "std_mean": "StdMean",
}
"""Those whose arguments are those of the rule; the others end in a refusal that names them."""

METHODS: Final[dict[str, str]] = {
    "var_by_axis": "var",
    "std_by_axis": "std",
    "max_by_axis": "max",
    "min_by_axis": "min",
    "aminmax_by_axis": "aminmax",
    "linalg_norm": "norm",
}
