"""Elementwise functions. Casts to whole numbers are among the nonlinear ones: they truncate."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "pointwise": """
    abs absolute __abs__ acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil cos cosh
    deg2rad rad2deg digamma erf erfc erfinv exp exp2 expm1 fix floor frac isfinite isinf isnan isneginf isposinf isreal
    lgamma log log10 log1p log2 logit nan_to_num reciprocal round rsqrt sigmoid sgn sign signbit sin sinc sinh sqrt square
    tan tanh trunc i0 logical_not bitwise_not __invert__ clamp clip clamp_min clamp_max
    atan2 arctan2 copysign float_power floor_divide __floordiv__ __rfloordiv__ fmax fmin fmod __mod__ __rmod__ gcd lcm
    heaviside hypot ldexp logaddexp logaddexp2 maximum minimum nextafter pow __pow__ __rpow__ remainder xlogy
    eq __eq__ ne not_equal __ne__ gt greater __gt__ ge greater_equal __ge__ lt less __lt__ le less_equal __le__ isclose
    logical_and logical_or logical_xor bitwise_and __and__ __rand__ bitwise_or __or__ __ror__ bitwise_xor __xor__ __rxor__
    addcdiv addcmul lerp masked_fill angle complex polar
    relu relu6 gelu silu mish elu selu celu leaky_relu softplus softsign softshrink hardshrink tanhshrink threshold hardtanh
    hardsigmoid hardswish logsigmoid
    long int short bool char byte
    bitwise_left_shift __lshift__ __rlshift__ bitwise_right_shift __rshift__ __rrshift__
    igamma igammac gammainc gammaincc gammaln mvlgamma multigammaln polygamma psi zeta entr erfcx expit i0e i1 i1e log_ndtr ndtr
    ndtri xlog1py airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
    modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
    laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
    """,
    "prelu": "prelu",
    "where": "where",
    "identity": "float double half bfloat16 cfloat cdouble",
    "copied": "positive __pos__ clone contiguous resolve_conj resolve_neg",
    "conjugated": "conj conj_physical real imag",
    "view_as_real": "view_as_real",
    "view_as_complex": "view_as_complex",
    "frexp": "frexp",
    "negated": "neg negative __neg__",
    "cast": "to astype",
    "add": "add __add__ __radd__ sub subtract __sub__ rsub __rsub__",
    "mul": "mul multiply __mul__ __rmul__",
    "div": "div divide true_divide __div__ __truediv__",
    "reversed_div": "__rdiv__ __rtruediv__",
}

IN_PLACE: Final[dict[str, str]] = {
    "pointwise": """
    abs_ absolute_ acos_ arccos_ acosh_ arccosh_ asin_ arcsin_ asinh_ arcsinh_ atan_ arctan_ atanh_ arctanh_ ceil_ cos_ cosh_
    deg2rad_ rad2deg_ digamma_ erf_ erfc_ erfinv_ exp_ exp2_ expm1_ fix_ floor_ frac_ lgamma_ log_ log10_ log1p_ log2_ logit_
    nan_to_num_ reciprocal_ round_ rsqrt_ sigmoid_ sgn_ sign_ sin_ sinc_ sinh_ sqrt_ square_ tan_ tanh_ trunc_ i0_
    logical_not_ bitwise_not_ clamp_ clip_ clamp_min_ clamp_max_ atan2_ arctan2_ copysign_ float_power_ floor_divide_
    __ifloordiv__ fmod_ __imod__ gcd_ lcm_ heaviside_ hypot_ ldexp_ nextafter_ pow_ __ipow__ remainder_ xlogy_
    eq_ ne_ not_equal_ gt_ greater_ ge_ greater_equal_ lt_ less_ le_ less_equal_
    logical_and_ logical_or_ logical_xor_ bitwise_and_ __iand__ bitwise_or_ __ior__ bitwise_xor_ __ixor__
    addcdiv_ addcmul_ lerp_ masked_fill_ relu_ threshold_ elu_ selu_ celu_ leaky_relu_ hardtanh_
    bitwise_left_shift_ __ilshift__ bitwise_right_shift_ __irshift__ igamma_ igammac_ mvlgamma_ polygamma_
    """,
    "conjugated": "conj_physical_",
    "negated": """
    neg_ negative_
    """,
    "add": """
    add_ __iadd__ sub_ subtract_ __isub__
    """,
    "mul": """
    mul_ multiply_ __imul__
    """,
    "div": """
    div_ divide_ true_divide_ __itruediv__ __idiv__
    """,
}

PARAMS: Final[dict[str, str]] = {
    "clamp": "min= max=",
    "clip": "min= max=",
    "pow": "exponent",
    "float_power": "exponent",
    "lerp": "end weight",
    "addcdiv": "tensor1 tensor2",
    "addcmul": "tensor1 tensor2",
    "masked_fill": "mask value",
    "heaviside": "values",
}
"""Of functions whose tensors have other names than those of their rule: these names; with ``=`` what may be left out."""

PRIMITIVES: Final[dict[str, str]] = {
    "pointwise": """
        Abs ACos Acosh AcosExt AcoshExt Asin AsinExt Asinh AsinhExt Atan AtanExt Atanh Ceil Cos Cosh Erf Erfc Erfinv Exp Exp2
        Expm1 Floor FloorDiv FloorDivScalar FloorMod FracExt IsFinite IsInf IsNan Log Log10 Log1p Log2 LogicalNot Reciprocal
        RemainderTensorTensor RemainderTensorScalar Round Rsqrt Sigmoid Sign Sin Sinc Sinh Sqrt Square Tan Tanh Trunc
        ClampTensor ClampScalar Atan2Ext Maximum Minimum Mod Pow PowTensorScalar PowScalarTensor Xlogy XLogYScalarOther
        Equal EqualExt NotEqual Greater GreaterScalar GreaterEqual GreaterEqualScalar Less LessScalar LessEqual
        LessEqualScalar EqScalar NeScalar LogicalAnd LogicalOr LogicalXor BitwiseAndTensor BitwiseOrTensor BitwiseXorTensor
        BitwiseNot Addcdiv AddcdivExt Addcmul AddcmulExt Lerp LerpScalar MaskedFill MaskedFillScalar
        ReLU GeLU GeluExt SiLU Mish Elu EluExt LeakyReLUExt SoftplusExt SoftShrink HShrink HSigmoid HSwish LogSigmoidExt
        Hardtanh ReLU6 Complex
    """,
    "where": "Select",
    "conjugated": "Conj Real Imag",
    "negated": "Neg",
    "cast": "Cast ToDtype",
    "add": "Add AddExt AddN AddScalar Sub SubExt SubScalar BiasAdd",
    "mul": "Mul Muls Swiglu",
    "div": "Div Divs DivMod DivMods RealDiv",
}
