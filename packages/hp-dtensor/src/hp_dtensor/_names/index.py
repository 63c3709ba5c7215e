"""Subscripts, lookups and writes by number, searches, writes of whole tensors, comparisons of two."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "getitem": "__getitem__",
    "setitem": "__setitem__",
    "index_select": "index_select",
    "gather": "gather",
    "take": "take",
    "take_along_dim": "take_along_dim",
    "embedding": "nn.functional.embedding",
    "embedding_bag": "nn.functional.embedding_bag",
    "rows_of": "_C._VariableFunctions.embedding",
    "index_put": "index_put",
    "put": "put",
    "scatter": "scatter",
    "scatter_add": "scatter_add",
    "scatter_reduce": "scatter_reduce",
    "index_add": "index_add",
    "index_copy": "index_copy",
    "index_reduce": "index_reduce",
    "index_fill": "index_fill",
    "masked_scatter": "masked_scatter",
    "masked_select": "masked_select",
    "nonzero": "nonzero argwhere",
    "unique": "unique unique_consecutive",
    "bincount": "bincount",
    "histc": "histc",
    "one_hot": "one_hot",
    "isin": "isin",
    "searchsorted": "searchsorted",
    "bucketize": "bucketize",
    "copy_": "copy_",
    "fill": "_C._VariableFunctions.fill",
    "fill_": "fill_",
    "zero_": "zero_",
    # MindSpore's Tensor.equal compares element by element.
    "equal": "Tensor.equal _C._VariableFunctions.equal",
    "allclose": "allclose",
    "is_same_size": "is_same_size",
}

IN_PLACE: Final[dict[str, str]] = {
    "index_put": "index_put_",
    "put": "put_",
    "scatter": "scatter_",
    "scatter_add": "scatter_add_",
    "scatter_reduce": "scatter_reduce_",
    "index_add": "index_add_",
    "index_copy": "index_copy_",
    "index_reduce": "index_reduce_",
    "index_fill": "index_fill_",
    "masked_scatter": "masked_scatter_",
}

PRIMITIVES: Final[dict[str, str]] = {
    "index_select": "IndexSelect",
    "slices_at": "Gather",
    "gather": "GatherD",
    "embedding": "Embedding",
    "scatter_add": "ScatterAddExt",
    "masked_select": "MaskedSelect",
    "nonzero": "NonZero NonZeroExt",
    "one_hot": "OneHotExt OneHot",
    "isin": "IsIn",
    "scatter": "Scatter TensorScatterElements",
    "index_put": """
        TensorScatterUpdate TensorScatterAdd TensorScatterSub ScatterUpdate ScatterNdUpdate ScatterAdd ScatterSub
    """,
    "index_add": "IndexAdd IndexAddExt",
    "copy_": "Assign",
    "getitem": "StridedSlice GatherNd",
}
