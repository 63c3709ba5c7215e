"""Functions of whole matrices."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "same_matrix": """
    inverse matrix_exp matrix_power cholesky_inverse
    linalg.inv linalg.matrix_exp linalg.matrix_power linalg.cholesky
    """,
    "transposed_matrix": "pinverse linalg.pinv",
    "number_of_matrix": "det logdet linalg.det linalg.cond linalg.matrix_rank",
    "row_of_matrix": "linalg.svdvals linalg.eigvals linalg.eigvalsh",
    "slogdet": "slogdet linalg.slogdet",
    "eigh": "linalg.eigh linalg.eig",
    "cholesky_ex": "linalg.cholesky_ex",
    "lu_factor": "linalg.lu_factor",
    "lu": "linalg.lu",
    "qr": "linalg.qr",
    "svd": "linalg.svd",
    "solve": "linalg.solve linalg.solve_triangular",
    "cholesky_solve": "cholesky_solve",
}
