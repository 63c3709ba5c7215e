"""Normalisations."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "group_norm": "group_norm",
    "batch_norm": "nn.functional.batch_norm",
    "instance_norm": "nn.functional.instance_norm",
    "normalize": "normalize",
    "cosine_similarity": "cosine_similarity",
}

PRIMITIVES: Final[dict[str, str]] = {
    "layer_norm": "LayerNormExt LayerNorm",
    "rms_norm": "RmsNorm",
    "group_norm": "GroupNorm",
    "batch_norm": "BatchNorm BatchNormExt",
    "normalize": "L2Normalize",
}
