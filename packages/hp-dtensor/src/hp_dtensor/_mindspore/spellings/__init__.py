"""Spellings by family; importing this package enters all of them in :data:`hp_dtensor._mindspore.spelling.SPELLINGS`."""

from hp_dtensor._mindspore.spelling import SPELLINGS
from hp_dtensor._mindspore.spellings import (
    along,
    attention,
    convolution,
    fourier,
    index,
    losses,
    moments,
    norms,
    places,
    products,
    random,
    shape,
    values,
)

__all__ = [
    "SPELLINGS",
    "along",
    "attention",
    "convolution",
    "fourier",
    "index",
    "losses",
    "moments",
    "norms",
    "places",
    "products",
    "random",
    "shape",
    "values",
]
