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
    "pixel_shuffle": "pixel_shuffle",
    "pixel_unshuffle": "pixel_unshuffle",
    "channel_shuffle": "channel_shuffle",
    "im2col": "_C._nn.im2col",
    "col2im": "_C._nn.col2im",
    "grid_sampler": "grid_sampler",
    "affine_grid_generator": "affine_grid_generator",
    "max_unpool2d": "_C._nn.max_unpool2d",
    "max_unpool3d": "_C._nn.max_unpool3d",
    # The function of torch itself gives places, too, unlike that of torch.nn.functional.
    "adaptive_max_pool1d_with_indices": "adaptive_max_pool1d_with_indices adaptive_max_pool1d",
    "adaptive_max_pool1d": "nn.functional.adaptive_max_pool1d",
}

PRIMITIVES: Final[dict[str, str]] = {
    "conv1d": "Conv1DExt Conv1DPadding",
    "conv2d": "Conv2D Conv2DExt Conv2DPadding",
    "conv3d": "Conv3D Conv3DExt Conv3DPadding",
}
