"""Matrix products and distances."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "matmul": "matmul mm bmm mv dot vdot __matmul__ linalg.matmul",
    "reversed_matmul": "__rmatmul__",
    "linear": "linear",
    "bilinear": "bilinear",
    "outer": "outer ger",
    "inner": "inner",
    "tensordot": "tensordot",
    "vecdot": "linalg.vecdot",
    "kron": "kron",
    "cross": "cross",
    "linalg_cross": "linalg.cross",
    "multi_dot": "linalg.multi_dot",
    "pairwise_distance": "pairwise_distance",
    "cdist": "cdist _C._VariableFunctions.cdist",
    "pdist": "pdist",
    "dist": "dist",
    "einsum": "einsum",
    "addmm": "addmm",
    "addmv": "addmv",
    "addr": "addr",
    "baddbmm": "baddbmm",
    "addbmm": "addbmm",
}

IN_PLACE: Final[dict[str, str]] = {
    "addmm": "addmm_",
    "addmv": "addmv_",
    "addr": "addr_",
    "baddbmm": "baddbmm_",
    "addbmm": "addbmm_",
}

PRIMITIVES: Final[dict[str, str]] = {
    "matmul": "MatMul MatMulExt BatchMatMul BatchMatMulExt Mm Mv Dot",
    "linear": "Dense",
    "outer": "Outer",
    "addmm": "Addmm",
    "addmv": "Addmv",
    "baddbmm": "Baddbmm",
    "addbmm": "Addbmm",
    "einsum": "Einsum",
}
