"""Matrix products."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "matmul": "matmul mm bmm mv dot __matmul__",
    "reversed_matmul": "__rmatmul__",
    "linear": "linear",
}

PRIMITIVES: Final[dict[str, str]] = {
    "matmul": "MatMul MatMulExt BatchMatMul BatchMatMulExt Mm Mv Dot",
    "linear": "Dense",
}
