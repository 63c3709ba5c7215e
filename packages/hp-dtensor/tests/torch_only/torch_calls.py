"""Arguments with which every spelling of every function of torch that has a rule can be called."""

import operator
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor import _names
from hp_dtensor._names.random import DRAWING

sys.path.insert(0, str(Path(__file__).parent))
from torch_operands import SHIFTS

HOMES = (torch.Tensor, torch, F, torch.special)

# Arguments after the first, for functions that need some; a word stands for a tensor of tensors_for.
WITH_ANOTHER = """
    atan2 arctan2 copysign float_power floor_divide fmax fmin fmod heaviside hypot ldexp logaddexp logaddexp2 maximum minimum
    nextafter pow remainder xlogy eq ne not_equal gt greater ge greater_equal lt less le less_equal isclose add sub subtract
    rsub mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __truediv__ __rdiv__
    __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__
    view_as reshape_as logical_and logical_or logical_xor clamp_min clamp_max gcd lcm bitwise_and __and__ __rand__
    bitwise_or __or__ __ror__ bitwise_xor __xor__ __rxor__ bmm dot vdot vecdot outer ger inner kron
"""
ARGUMENTS: dict[str, list[Any]] = {
    **{name: ["y"] for name in WITH_ANOTHER.split()},
    "clamp": [-0.5, 0.5],
    "clip": [-0.5, 0.5],
    "threshold": [0.1, 20.0],
    "addcmul": ["y", "y"],
    "addcdiv": ["y", "y"],
    "lerp": ["y", 0.5],
    "masked_fill": ["mask", 3.0],
    "where": ["mask", "y"],
    "full_like": [2.5],
    "to": [torch.float32],
    "view": [(20,)],
    "reshape": [(2, 10)],
    "unflatten": [0, (2, 2)],
    "unsqueeze": [0],
    "permute": [(1, 0)],
    "transpose": [0, 1],
    "swapaxes": [0, 1],
    "swapdims": [0, 1],
    "expand": [(3, 4, 5)],
    "broadcast_to": [(3, 4, 5)],
    "mm": ["other"],
    "matmul": ["other"],
    "__matmul__": ["other"],
    "__rmatmul__": ["left"],
    "linear": ["weight"],
    "mv": ["vector"],
    "bilinear": ["y", "weight of pairs"],
    "tensordot": ["other", 1],
    "addmm": ["left of product", "right of product"],
    "addmv": ["square", "four"],
    "addr": ["four", "vector"],
    "baddbmm": ["left batch", "right batch"],
    "addbmm": ["left batch", "right batch"],
}
ARGUMENTS.update(
    {
        key: [0]
        for key in [
            "logsumexp",
            "softmax",
            "log_softmax",
            "softmin",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "cummax",
            "cummin",
        ]
    }
)
ARGUMENTS.update({key: [2, 0] for key in ["topk", "kthvalue"]})
ARGUMENTS.update({key: [(5,), "vector"] for key in ["layer_norm", "rms_norm"]})
ARGUMENTS.update(
    {
        key: ["y"]
        for key in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity", "kl_div"]
    }
)
ARGUMENTS.update(
    {key: ["y"] for key in ["binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"]}
)
ARGUMENTS.update({key: ["classes"] for key in ["cross_entropy", "nll_loss"]})
ARGUMENTS["group_norm"] = [5, "vector", "vector"]
ARGUMENTS["batch_norm"] = ["vector", "vector", "vector"]
ALL_ARGUMENTS: dict[str, list[Any]] = {
    "instance_norm": ["image 2"],
    "where": ["mask", "x", "y"],
    "Tensor.where": ["x", "mask", "y"],
    "cross": ["x", "y", -1],
    "torch.linalg.cross": ["x", "y"],
    "einsum": ["ij,jk", "x", "other"],
    "multi_dot": [["x", "other", "left"]],
    "scaled_dot_product_attention": ["image 2", "image 2", "image 2"],
    "interpolate": ["image 2", None, 2.0],
    "matrix_power": ["positive", 2],
    "solve": ["positive", "x"],
    "solve_triangular": ["positive", "x"],
    "cholesky_solve": ["x", "positive"],
}
"""The same where the first one is not x, or for a function of one module."""
for _n in (1, 2, 3):
    ALL_ARGUMENTS[f"conv{_n}d"] = [f"image {_n}", f"kernel {_n}"]
    ALL_ARGUMENTS[f"conv_transpose{_n}d"] = [f"image {_n}", f"transposed kernel {_n}"]
    for _kind in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        for _indices in ("", "_with_indices"):
            ALL_ARGUMENTS[f"{_kind}{_n}d{_indices}"] = [f"image {_n}", 2]
for _name in [
    "inverse",
    "inv",
    "matrix_exp",
    "det",
    "logdet",
    "cond",
    "matrix_rank",
    "svdvals",
    "eigvals",
    "eigvalsh",
    "slogdet",
    "eigh",
    "eig",
    "cholesky_ex",
    "lu_factor",
    "lu",
    "qr",
    "svd",
    "cholesky",
    "cholesky_inverse",
]:
    ALL_ARGUMENTS[_name] = ["positive"]
ALL_ARGUMENTS.update(
    {
        **{
            key: [["x", "y"]]
            for key in [
                "cat",
                "concat",
                "concatenate",
                "stack",
                "hstack",
                "vstack",
                "row_stack",
                "dstack",
                "column_stack",
            ]
        },
        "broadcast_tensors": ["x", "vector"],
        "meshgrid": ["vector", "four"],
        "embedding": ["x", "numbers"],
        "torch.nn.functional.embedding": ["numbers", "x"],
        "one_hot": ["numbers", 4],
        "isin": ["numbers", "numbers"],
        "bincount": ["numbers"],
        "searchsorted": ["rising", "x"],
    }
)
for _name in ["split", "unsafe_split", "chunk", "unsafe_chunk", "tensor_split"]:
    ARGUMENTS[_name] = [2]
for _name in ["split_with_sizes", "unsafe_split_with_sizes"]:
    ARGUMENTS[_name] = [(1, 3)]
for _name in ["narrow", "narrow_copy"]:
    ARGUMENTS[_name] = [0, 1, 2]
for _name in ["scatter", "scatter_add"]:
    ARGUMENTS[_name] = [0, "places", "y"]
for _name in ["index_add", "index_copy"]:
    ARGUMENTS[_name] = [0, "numbers", "weight"]
for _name in ["movedim", "moveaxis", "select"]:
    ARGUMENTS[_name] = [0, 1]
for _name in ["repeat", "tile"]:
    ARGUMENTS[_name] = [(2, 1)]
for _name in ["equal", "allclose", "is_same_size", "copy_"]:
    ARGUMENTS[_name] = ["y"]
ARGUMENTS.update(
    {
        "expand_as": ["cube"],
        "hsplit": [5],
        "vsplit": [4],
        "dsplit": [2],
        "repeat_interleave": [2],
        "roll": [1],
        "flip": [(0,)],
        "pad": [(1, 1)],
        "unfold": [0, 2, 1],
        "__getitem__": [1],
        "__setitem__": [1, 2.0],
        "index_select": [0, "numbers"],
        "gather": [0, "places"],
        "take": ["numbers"],
        "take_along_dim": ["places", 0],
        "index_put": [["numbers"], "weight"],
        "scatter_reduce": [0, "places", "y", "amax"],
        "index_reduce": [0, "numbers", "weight", "amax"],
        "index_fill": [0, "numbers", 2.0],
        "masked_scatter": ["mask", "y"],
        "masked_select": ["mask"],
        "histc": [4, 0.0, 1.0],
        "bucketize": ["rising"],
        "fill_": [2.0],
    }
)
ARGUMENTS.update(
    {
        key: ["y"]
        for key in [
            "dist",
            "gammainc",
            "gammaincc",
            "igamma",
            "igammac",
            "pairwise_distance",
            "slice_scatter",
            "xlog1py",
        ]
    }
)
ARGUMENTS.update({key: ["y"] for key in SHIFTS.split()})
ARGUMENTS.update({key: [0.5] for key in ("quantile", "nanquantile")})
ARGUMENTS.update({key: [1] for key in ("mvlgamma", "multigammaln", "polygamma")})
ARGUMENTS.update({key: [3] for key in dir(torch.special) if "_polynomial_" in key})
ARGUMENTS.update(
    {
        "cdist": ["y"],
        "renorm": [2, 0, 1.0],
        "complex": ["y"],
        "polar": ["y"],
        "put": ["numbers", "three"],
        "prelu": ["vector"],
        "select_scatter": ["vector", 0, 1],
        "diagonal_scatter": ["four"],
        "fill_diagonal_": [2.0],
        "fill": [2.0],
        "block_diag": ["y"],
        "glu": [0],
    }
)
ALL_ARGUMENTS.update(
    {
        "imag": ["complex"],
        "view_as_real": ["complex"],
        "view_as_complex": ["pairs"],
        "zeta": [2.0, "x"],
        "torch.polygamma": [1, "x"],
        "torch.special.polygamma": [1, "x"],
        ".cdist": ["x", "y", 2.0, None],
        ".block_diag": [["x", "y"]],
        "as_strided": ["vector", (2, 2), (1, 1)],
        "embedding_bag": ["bags", "x"],
        "pixel_shuffle": ["pixels", 2],
        "pixel_unshuffle": ["pixels", 2],
        "channel_shuffle": ["pixels", 2],
        "im2col": ["pixels", (2, 2), (1, 1), (0, 0), (1, 1)],
        "col2im": ["cube", (2, 6), (2, 2), (1, 1), (0, 0), (1, 1)],
        "grid_sampler": ["pixels", "points", 0, 0, False],
        "affine_grid_generator": ["theta", (2, 1, 3, 2), False],
        "max_unpool2d": ["image 2", "places in image 2", (5, 4)],
        "max_unpool3d": ["image 3", "places in image 3", (3, 4, 3), (1, 1, 1), (0, 0, 0)],
        "margin_ranking_loss": ["x", "y", "y"],
        "hinge_embedding_loss": ["x", "y"],
        "poisson_nll_loss": ["x", "y", True, False, 1e-8, 1],
        "cosine_embedding_loss": ["x", "y", "four"],
        "triplet_margin_loss": ["x", "y", "x"],
        "ctc_loss": ["scores", "targets", "steps", "lengths"],
        "multi_margin_loss": ["x", "classes"],
        "multilabel_margin_loss": ["x", "labels"],
    }
)
KEYWORDS: dict[str, dict[str, Any]] = {
    "solve_triangular": {"upper": True},
    "kl_div": {"reduction": "sum"},
    "meshgrid": {"indexing": "ij"},
}


def spellings() -> list[tuple[str, Any]]:
    # Random values are ours, not torch's: test_torch_random.py.
    functions = [pair for pair in _names.functions() if pair[0] not in {*DRAWING, "empty_like"}]
    plain = [
        (name, home)
        for _, name in functions
        if "." not in name
        for home in (HOMES[:1] if name.startswith("__") else HOMES)
        if callable(getattr(home, name, None))
    ]
    dotted = [name.rpartition(".") for _, name in functions if "." in name]
    return [*plain, *((name, operator.attrgetter(home)(torch)) for home, _, name in dotted)]


def arguments_of(name: str, home: Any, values: dict[str, Any]) -> list[Any]:
    """The arguments of a call, with these tensors."""
    own = f"{getattr(home, '__name__', '')}.{name}"
    args = ALL_ARGUMENTS.get(own, ALL_ARGUMENTS.get(name, ["x", *ARGUMENTS.get(name, [])]))

    def filled(a: Any) -> Any:
        if isinstance(a, list):
            return list(map(filled, a))
        return values.get(a, a) if isinstance(a, str) else a

    return list(map(filled, args))
