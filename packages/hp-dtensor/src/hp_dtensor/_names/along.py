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
    "mode": "mode",
    "median": "median nanmedian",
}

PRIMITIVES: Final[dict[str, str]] = {}
