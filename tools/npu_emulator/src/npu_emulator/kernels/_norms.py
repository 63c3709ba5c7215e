"""Root mean square norm, SwiGLU and rotary embedding."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_emulator.kernels._fused import reference


@reference("npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """y = x / rms(x) * gamma, rms over the dimensions of gamma; also returns 1 / rms(x) in float32."""
    x_f32 = x.float()
    normalized_dims = list(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x_f32.pow(2).mean(normalized_dims, keepdim=True) + epsilon)
    return (x_f32 * rstd).to(x.dtype) * gamma, rstd


@reference("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx = rstd * (g - xhat * mean(g * xhat)) with xhat = x * rstd and g = dy * gamma; dgamma = sum(dy * xhat)."""
    normalized_dims = list(range(-gamma.dim(), 0))
    leading_dims = list(range(x.dim() - gamma.dim()))
    dy_f32 = dy.float()
    xhat = x.float() * rstd
    dgamma = (dy_f32 * xhat).sum(leading_dims) if leading_dims else dy_f32 * xhat
    g = dy_f32 * gamma.float()
    dx = rstd * (g - xhat * (g * xhat).mean(normalized_dims, keepdim=True))
    return dx.to(x.dtype), dgamma


@reference("npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(a) * b for the halves a, b of x."""
    a, b = x.chunk(2, dim)
    return silu(a) * b


@reference("npu_swiglu_backward")
def swiglu_backward(dy: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    s = torch.sigmoid(a)
    return torch.cat([dy * b * (s + a * s * (1 - s)), dy * a * s], dim)


def _rotate(x: Tensor, mode: str) -> Tensor:
    """A quarter turn of each pair (a, b) to (-b, a); pairs are halves apart, or neighbours."""
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    if mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    raise ValueError(f"rotary_mode={mode!r}; expected 'half' or 'interleave'")


@reference("npu_rotary_mul")
def rotary_mul(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """x * cos + rotate(x) * sin."""
    if rotate is not None:
        raise NotImplementedError("npu_rotary_mul with a rotate matrix is not emulated")
    return (x * cos + _rotate(x, rotary_mode) * sin).to(x.dtype)


@reference("npu_rotary_mul_backward")
def rotary_mul_backward(
    dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The transpose of a quarter turn is the turn back: dx = dy * cos - rotate(dy * sin)."""
    dx = dy * cos - _rotate(dy * sin, rotary_mode)
    dcos = (dy * x).sum_to_size(cos.shape)
    dsin = (dy * _rotate(x, rotary_mode)).sum_to_size(sin.shape)
    return dx.to(x.dtype), dcos.to(cos.dtype), dsin.to(sin.dtype)
