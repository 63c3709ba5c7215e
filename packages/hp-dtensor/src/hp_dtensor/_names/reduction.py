"""Reductions."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "sum": "sum",
    "mean": "mean",
}

PRIMITIVES: Final[dict[str, str]] = {
    "sum": "SumExt ReduceSum",
    "mean": "MeanExt ReduceMean",
}
