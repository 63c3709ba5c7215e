"""Logarithm, sine, cosine and the normal quantile, of sums, products, quotients and square roots in float64 alone.

IEEE rounds these alike everywhere, while the libraries' own functions differ in the last places: so values computed here are
equal to the bit on every device and framework that does not fuse products with sums. Sources: the series of the logarithm in
``(m - 1) / (m + 1)`` and of sine and cosine; for the quantile Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37, 1988.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

Array = Any

_MANTISSA: Final = 2**52 - 1
_EXPONENT_OF_ONE: Final = 1023 << 52
TERMS: Final = {"float32": 6, "float64": 11}
"""Terms of each series. The first one left out is below 1e-10 of the result, and below 1e-17."""


def horner(x: Array, coefficients: Sequence[float]) -> Array:
    """``c0 + c1 x + c2 x**2 + ...``."""
    value = x * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        value = value * x + coefficient
    return value


def log(xp: Any, x: Array, terms: int, digits: int = 0) -> Array:
    """``log(x / 2**digits)`` of positive normal float64 numbers; nothing cancels where the quotient is near 1."""
    bits = xp.bits(x)
    mantissa = xp.from_bits((bits & _MANTISSA) | _EXPONENT_OF_ONE)
    is_large = mantissa > math.sqrt(2.0)
    mantissa = xp.where(is_large, mantissa * 0.5, mantissa)
    exponent = (bits >> 52) - (1023 + digits)
    exponent = xp.double(xp.where(is_large, exponent + 1, exponent))
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = horner(s * s, [2.0 / (2 * k + 1) for k in range(terms)])
    return s * series + exponent * math.log(2.0)


def cos_and_sin(xp: Any, n: Array, digits: int, terms: int) -> tuple[Array, Array]:
    """Cosine and sine of ``n / 2**digits`` turns, for whole numbers (int64) from 0 to ``2**digits - 1``."""
    quarter = (n + 2 ** (digits - 3)) >> (digits - 2)
    turned = xp.double(n - quarter * 2 ** (digits - 2)) * 2.0 ** (2 - digits)
    x = turned * (math.pi / 2)  # at most an eighth of a turn from the nearest quarter
    z = x * x
    cos = horner(z, [(-1.0) ** k / math.factorial(2 * k) for k in range(terms)])
    sin = x * horner(z, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(terms)])
    is_odd = (quarter & 1) == 1
    cos, sin = xp.where(is_odd, sin, cos), xp.where(is_odd, cos, sin)
    return xp.where(((quarter + 1) & 2) == 2, -cos, cos), xp.where((quarter & 2) == 2, -sin, sin)


_CENTRE: Final = (
    (
        3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
        4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
    ),
    (
        1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
        3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
    ),
)  # fmt: skip
_NEAR: Final = (
    (
        1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
        1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
    ),
    (
        1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
        1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
    ),
)  # fmt: skip
_FAR: Final = (
    (
        6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
        2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
    ),
    (
        1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
        1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
    ),
)  # fmt: skip


def normal_quantile(xp: Any, p: Array) -> Array:
    """The number below which a standard normal one lies with probability ``p``, float64 between 0 and 1."""
    q = p - 0.5
    is_low = q < 0.0
    tail = xp.where(is_low, p, 1.0 - p)
    r = xp.sqrt(log(xp, tail, TERMS["float64"]) * -1.0)
    near = horner(r - 1.6, _NEAR[0]) / horner(r - 1.6, _NEAR[1])
    far = horner(r - 5.0, _FAR[0]) / horner(r - 5.0, _FAR[1])
    outer = xp.where(r <= 5.0, near, far)
    outer = xp.where(is_low, -outer, outer)
    z = q * -1.0 * q + 0.180625
    centre = q * (horner(z, _CENTRE[0]) / horner(z, _CENTRE[1]))
    return xp.where((q <= 0.425) & (q >= -0.425), centre, outer)
