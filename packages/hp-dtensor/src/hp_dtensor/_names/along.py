"""Functions along a dim that every rank needs whole."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "softmax": "softmax log_softmax softmin",
    "cumsum": "cumsum",
    "cumulative": "cumprod logcumsumexp",
    "cumulative_extreme": "cummax cummin",
    "topk": "topk",
    "sort": "sort",
    "argsort": "argsort",
    "msort": "msort",
    "kthvalue": "kthvalue",
    "order_statistic": "mode",
    "median": "median nanmedian",
    "glu": "_C._nn.glu",
    "diff": "diff",
    "trapezoid": "trapezoid trapz",
    "cumulative_trapezoid": "cumulative_trapezoid",
    "quantile": "quantile nanquantile",
    "renorm": "renorm",
    "cov": "cov",
    "corrcoef": "corrcoef",
}

IN_PLACE: Final[dict[str, str]] = {"cumsum": "cumsum_", "cumulative": "cumprod_"}

PRIMITIVES: Final[dict[str, str]] = {
    "softmax": "Softmax LogSoftmax LogSoftmaxExt SoftmaxCrossEntropyWithLogits",
    "cumsum": "CumsumExt CumSum",
    "cumulative": "CumProd",
    "cumulative_extreme": "Cummax",
    "topk": "TopkExt TopK",
    "sort": "SortExt Sort",
    "argsort": "ArgSort",
    "median": "Median MedianDim",
}

METHODS: Final[dict[str, str]] = {"order_statistic": "median nanmedian"}
