"""Which functions of the frameworks follow which rule, by name. The adapters look the names up; a name may have several homes.

FUNCTIONS: methods of both frameworks' tensors; on torch also functions of torch, torch.nn.functional and torch.special. One
operation has several identities (``x ** 2`` is neither Tensor.pow nor torch.pow), so every spelling stands here.
PRIMITIVES: what MindSpore's functions and operators end in.
"""

from __future__ import annotations

from typing import Final

_POINTWISE: Final = """
    abs absolute __abs__ acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil cos cosh
    deg2rad rad2deg digamma erf erfc erfinv exp exp2 expm1 fix floor frac isfinite isinf isnan isneginf isposinf isreal
    lgamma log log10 log1p log2 logit nan_to_num reciprocal round rsqrt sigmoid sgn sign signbit sin sinc sinh sqrt square
    tan tanh trunc i0 logical_not bitwise_not __invert__ clamp clip clamp_min clamp_max
    atan2 arctan2 copysign float_power floor_divide __floordiv__ __rfloordiv__ fmax fmin fmod __mod__ __rmod__ gcd lcm
    heaviside hypot ldexp logaddexp logaddexp2 maximum minimum nextafter pow __pow__ __rpow__ remainder xlogy
    eq __eq__ ne not_equal __ne__ gt greater __gt__ ge greater_equal __ge__ lt less __lt__ le less_equal __le__ isclose
    logical_and logical_or logical_xor bitwise_and __and__ __rand__ bitwise_or __or__ __ror__ bitwise_xor __xor__ __rxor__
    addcdiv addcmul lerp masked_fill
    relu relu6 gelu silu mish elu selu celu leaky_relu softplus softsign softshrink hardshrink tanhshrink threshold hardtanh
    hardsigmoid hardswish logsigmoid
    long int short bool char byte
"""
"""Elementwise and not linear. Casts to whole numbers are among them: they truncate."""

FUNCTIONS: Final[dict[str, str]] = {
    "pointwise": _POINTWISE,
    "where": "where",
    "identity": "neg negative __neg__ positive __pos__ clone contiguous float double half bfloat16",
    "cast": "to astype",
    "add": "add __add__ __radd__ sub subtract __sub__ rsub __rsub__",
    "mul": "mul multiply __mul__ __rmul__",
    "div": "div divide true_divide __div__ __truediv__",
    "reversed_div": "__rdiv__ __rtruediv__",
    "matmul": "matmul mm bmm mv dot __matmul__",
    "reversed_matmul": "__rmatmul__",
    "linear": "linear",
    "sum": "sum",
    "mean": "mean",
    "view": "view reshape",
    "view_as": "view_as reshape_as",
    "flatten": "flatten",
    "unflatten": "unflatten",
    "squeeze": "squeeze",
    "unsqueeze": "unsqueeze",
    "permute": "permute",
    "transpose": "transpose swapaxes swapdims",
    "t": "t",
    "expand": "expand broadcast_to",
}

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
        Hardtanh ReLU6
    """,
    "where": "Select",
    "identity": "Neg",
    "cast": "Cast ToDtype",
    "add": "Add AddExt AddScalar Sub SubExt SubScalar",
    "mul": "Mul Muls",
    "div": "Div Divs DivMod DivMods RealDiv",
    "matmul": "MatMul MatMulExt BatchMatMul BatchMatMulExt Mm Mv Dot",
    "linear": "Dense",
    "sum": "SumExt ReduceSum",
    "mean": "MeanExt ReduceMean",
    "view": "Reshape View",
    "flatten": "FlattenExt",
    "unflatten": "Unflatten",
    "squeeze": "Squeeze",
    "unsqueeze": "ExpandDims ExpandDimsView",
    "permute": "Transpose TransposeView",
    "transpose": "TransposeExtView TransposeExt",
    "t": "TExt",
    "expand": "BroadcastTo BroadcastToView ExpandDimsTo",
}
