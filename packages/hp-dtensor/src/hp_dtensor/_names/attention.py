"""Attention."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "scaled_dot_product_attention": "scaled_dot_product_attention",
}

PRIMITIVES: Final[dict[str, str]] = {
    "scaled_dot_product_attention": "FlashAttentionScore",
}
