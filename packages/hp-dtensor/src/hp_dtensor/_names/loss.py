"""Losses."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "mse_loss": "mse_loss",
    "l1_loss": "l1_loss",
    "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss",
    "soft_margin_loss": "soft_margin_loss",
    "binary_cross_entropy": "nn.functional.binary_cross_entropy",
    "binary_cross_entropy_with_logits": "nn.functional.binary_cross_entropy_with_logits",
    "kl_div": "nn.functional.kl_div",
    "cross_entropy": "cross_entropy",
    "nll_loss": "nll_loss",
}

PRIMITIVES: Final[dict[str, str]] = {}
