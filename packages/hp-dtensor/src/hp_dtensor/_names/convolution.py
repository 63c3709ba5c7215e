"""Convolutions, pooling and resampling."""

from typing import Final

_IN_1_2_3_DIMS = """
    conv{n}d conv_transpose{n}d avg_pool{n}d max_pool{n}d max_pool{n}d_with_indices
    adaptive_avg_pool{n}d adaptive_max_pool{n}d adaptive_max_pool{n}d_with_indices
"""

FUNCTIONS: Final[dict[str, str]] = {
    **{
        name: name
        for n in (1, 2, 3)
        for name in _IN_1_2_3_DIMS.format(n=n).split()
        if name != "adaptive_max_pool1d"
    },
    "interpolate": "interpolate",
    # The function of torch itself gives places, too, unlike that of torch.nn.functional.
    "adaptive_max_pool1d_with_indices": "adaptive_max_pool1d_with_indices adaptive_max_pool1d",
    "adaptive_max_pool1d": "nn.functional.adaptive_max_pool1d",
}
