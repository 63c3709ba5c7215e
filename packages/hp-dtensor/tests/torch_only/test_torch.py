"""DTensors in torch's own functions, modules and optimizers' data; what goes below the Python function level."""

import inspect
import operator
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, Replicate, Shard, _names, distribute_tensor
from hp_dtensor._names.random import DRAWING
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
HOMES = (torch.Tensor, torch, F, torch.special)
# Elementwise functions and a single product, in float64.
TOLERANCE = 1e-13

# Arguments after the first, for functions that need some; a word stands for a tensor of _tensors.
WITH_ANOTHER = """
    atan2 arctan2 copysign float_power floor_divide fmax fmin fmod heaviside hypot ldexp logaddexp logaddexp2 maximum minimum
    nextafter pow remainder xlogy eq ne not_equal gt greater ge greater_equal lt less le less_equal isclose add sub subtract
    rsub mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __truediv__ __rdiv__
    __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__
    view_as reshape_as logical_and logical_or logical_xor clamp_min clamp_max gcd lcm bitwise_and __and__ __rand__
    bitwise_or __or__ __ror__ bitwise_xor __xor__ __rxor__ bmm dot vdot vecdot outer ger inner kron
"""
SHIFTS = "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __rlshift__ __rrshift__"
INTEGERS = "gcd lcm bitwise_not __invert__ bitwise_and __and__ __rand__ bitwise_or __or__ __ror__ bitwise_xor __xor__ __rxor__"
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
OTHER_SHAPES = {
    "dsplit": ((2, 3, 4), (1,)),
    "bmm": ((2, 4, 3), (2, 3, 5)),
    "dot": ((7,), (7,)),
    "vdot": ((7,), (7,)),
    "outer": ((7,), (5,)),
    "ger": ((7,), (5,)),
    "cross": ((4, 3), (4, 3)),
    "baddbmm": ((2, 4, 5), (1,)),
    "addmv": ((4,), (1,)),
}


def _spellings() -> list[tuple[str, Any]]:
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


def _arguments(name: str, home: Any, values: dict[str, Any]) -> list[Any]:
    """The arguments of a call, with these tensors."""
    own = f"{getattr(home, '__name__', '')}.{name}"
    args = ALL_ARGUMENTS.get(own, ALL_ARGUMENTS.get(name, ["x", *ARGUMENTS.get(name, [])]))

    def filled(a: Any) -> Any:
        if isinstance(a, list):
            return list(map(filled, a))
        return values.get(a, a) if isinstance(a, str) else a

    return list(map(filled, args))


def _tensors(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05

    if name in OTHER_SHAPES:
        first, second = OTHER_SHAPES[name]
        return {**_operands(draw), "x": draw(*first), "y": draw(*second)}
    if name in (*INTEGERS.split(), *SHIFTS.split()):
        return {"x": torch.arange(20).reshape(4, 5), "y": torch.arange(20).reshape(4, 5) % 7 + 1}
    return {
        "x": draw(4, 5) + (1.0 if name in ("acosh", "arccosh") else 0.0),
        "y": draw(4, 5),
        "mask": draw(4, 5) > 0.5,
        "other": draw(5, 3),
        "left": draw(3, 4),
        "weight": draw(3, 5),
        "vector": draw(5),
        "classes": torch.tensor([2, 0, 1, 2]),
        **_operands(draw),
    }


def _operands(draw: Any) -> dict[str, torch.Tensor]:
    """Of products and layers."""
    places = {1: (5,), 2: (5, 4), 3: (3, 4, 3)}
    return {
        "complex": torch.complex(draw(4, 5), draw(4, 5)),
        "numbers": torch.tensor([2, 0, 3]),
        "places": torch.arange(20).reshape(4, 5) * 7 % 4,
        "rising": torch.arange(6, dtype=torch.float64) / 6,
        "cube": draw(3, 4, 5),
        **{f"image {n}": draw(2, 3, *sizes) for n, sizes in places.items()},
        **{f"kernel {n}": draw(4, 3, *(2 for _ in sizes)) for n, sizes in places.items()},
        **{f"transposed kernel {n}": draw(3, 4, *(2 for _ in sizes)) for n, sizes in places.items()},
        "positive": torch.eye(4, dtype=torch.float64) * torch.arange(1.0, 5) + 0.1,
        "weight of pairs": draw(3, 5, 5),
        "left of product": draw(4, 3),
        "right of product": draw(3, 5),
        "square": draw(4, 4),
        "four": draw(4),
        "three": draw(3),
        "bags": torch.arange(8).reshape(4, 2) % 4,
        "pixels": draw(2, 4, 4, 2),
        "points": draw(2, 3, 2, 2),
        "theta": draw(2, 2, 3),
        "places in image 2": torch.arange(120).reshape(2, 3, 5, 4) % 20,
        "places in image 3": torch.arange(216).reshape(2, 3, 3, 4, 3) % 36,
        "scores": draw(5, 4, 3).log_softmax(2),
        "targets": torch.arange(8).reshape(4, 2) % 2 + 1,
        "steps": torch.full((4,), 5),
        "lengths": torch.tensor([2, 1, 2, 1]),
        "labels": torch.zeros(4, 5, dtype=torch.int64),
        "left batch": draw(2, 4, 3),
        "right batch": draw(2, 3, 5),
    }


def _line(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


@distributed(world_size=2, backends=TORCH)
def test_every_spelling_of_every_rule_gives_the_unsharded_value(world: World) -> None:
    mesh, tried = _line(world), 0
    for name, home in _spellings():
        function = getattr(home, name)
        plain = {n: t.to(world.device) for n, t in _tensors(name).items()}
        keywords = KEYWORDS.get(name, {})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"index_reduce\(\) is in beta", UserWarning)
            whole = function(*_arguments(name, home, plain), **keywords)
        if whole is None:
            continue  # written: test_writes
        for placement in (Shard(0), Replicate()):
            cut = {
                n: distribute_tensor(t, mesh, [placement if t.ndim > 1 else Replicate()])
                for n, t in plain.items()
            }
            found = function(*_arguments(name, home, cut), **keywords)
            label = f"{getattr(home, '__name__', home)}.{name} of {placement}"
            several = found if isinstance(found, tuple) else (found,)
            for result, value in zip(several, whole if isinstance(whole, tuple) else (whole,), strict=True):
                if isinstance(value, bool):
                    assert result is value, label
                    continue
                assert isinstance(result, DTensor), label
                assert_parity(result, value, rtol=TOLERANCE, atol=TOLERANCE, name=label)
        tried = tried + 1
    assert tried > 300


@distributed(world_size=2, backends=TORCH)
def test_every_function_of_torch_has_a_rule_or_is_refused(world: World) -> None:
    """Called with DTensors for all its arguments, no function gives anything of a shard's shape."""
    x = distribute_tensor(
        torch.ones(7, 11, dtype=torch.float64, device=world.device), _line(world), [Shard(0)]
    )
    shard = tuple(x.to_local().shape)
    refused = 0
    for function, example in torch.overrides.get_testing_overrides().items():
        if "distributed" in (getattr(function, "__module__", None) or ""):
            continue  # collectives: they would wait for each other
        if function is torch.Tensor.__reduce_ex__:
            continue  # a pickle holds the piece
        needed = [p for p in inspect.signature(example).parameters.values() if p.default is p.empty]
        args = [x for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch about its own old functions
                result = function(*args)
        except NotImplementedError as error:
            # Else what torch itself does not implement for such arguments.
            refused = refused + ("has no rule for DTensors" in str(error))
        except (ValueError, TypeError, RuntimeError, IndexError, AssertionError):
            continue  # arguments that make no sense
        else:
            plain = [r for r in torch.utils._pytree.tree_leaves(result) if type(r) is torch.Tensor]
            assert shard not in [tuple(r.shape) for r in plain], f"{function} computed on a shard"
    assert refused > 100


@distributed(world_size=2, backends=TORCH)
def test_operators_beside_what_is_no_number_answer_as_those_of_a_tensor(world: World) -> None:
    plain = torch.ones(7, 11, dtype=torch.float64, device=world.device)
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(plain, _line(world), [placement])
        for other in (None, "a", ..., object()):
            for _ in range(2):  # also where the operation is known
                assert (x == other) is (plain == other) is False
                assert (other == x) is False
                assert (x != other) is True
                for call in (lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a < b, lambda a, b: b / a):
                    with pytest.raises(TypeError, match="not supported between|unsupported operand|str"):
                        call(x, other)


@distributed(world_size=2, backends=TORCH)
def test_options_that_are_not_linear_reduce_first(world: World) -> None:
    local = torch.full((4,), [1.25, 2.5][world.rank], dtype=torch.float64, device=world.device)
    x = DTensor.from_local(local, _line(world), [Partial()])
    for call in (
        lambda t: t.sum(dtype=torch.int64),
        lambda t: torch.sum(t, 0, dtype=torch.int64),
        lambda t: torch.div(t, 2, rounding_mode="floor"),
        lambda t: t.long(),
        lambda t: t + numpy.float32(2),
    ):
        found = call(x)
        assert found.placements == (Replicate(),)
        assert_parity(
            found, call(torch.full((4,), 3.75, dtype=torch.float64, device=world.device)), exact=True
        )
    known = len(x._spec.plans)
    for n in range(5):
        _ = x * numpy.float64(n)
    assert len(x._spec.plans) == known + 1


@distributed(world_size=2, backends=TORCH)
def test_what_slips_below_python_raises(world: World) -> None:
    x = distribute_tensor(torch.ones(4, device=world.device), _line(world), [Shard(0)])
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(NotImplementedError, match="below the Python function level"),
    ):
        torch.exp(x)
    with pytest.raises(NotImplementedError, match=r"Tensor.numpy has no rule"):
        x.numpy()


@distributed(world_size=2, backends=TORCH)
def test_modules_train_on_parameters_that_are_dtensors(world: World) -> None:
    torch.manual_seed(0)
    plain = (
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
        .double()
        .to(world.device)
    )
    data = torch.randn(5, 4, dtype=torch.float64, device=world.device)
    places = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}
    expected = plain(data).square().mean()
    expected.backward()
    sharded = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
    for name, parameter in plain.named_parameters():
        index, attribute = name.split(".")
        value = torch.nn.Parameter(distribute_tensor(parameter.detach(), _line(world), [places[name]]))
        assert isinstance(value, torch.nn.Parameter)
        setattr(sharded[int(index)], attribute, value)
    loss = sharded(distribute_tensor(data, _line(world), [Replicate()])).square().mean()
    with count_collectives() as counted:
        loss.backward()
    counted.assert_counts()  # the input needs no gradient, every weight has its own rows
    assert_parity(loss.full_tensor(), expected, rtol=TOLERANCE, name="loss")
    for name, parameter in plain.named_parameters():
        assert_parity(
            dict(sharded.named_parameters())[name].grad,
            parameter.grad,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            name=name,
        )


@distributed(world_size=2, backends=TORCH)
def test_shapes_dtypes_and_attributes_are_those_of_torch(world: World) -> None:
    x = distribute_tensor(torch.ones(4, 3, device=world.device), _line(world), [Shard(0)])
    assert isinstance(x, torch.Tensor)
    assert x.shape == torch.Size([4, 3])
    assert x.shape.numel() == x.numel() == torch.numel(x) == 12
    assert (x.dtype, x.device, x.is_cpu) == (torch.float32, x.to_local().device, world.device_type == "cpu")
    assert x.is_floating_point()
    assert (x * 2).requires_grad is False
    assert x.requires_grad_() is x
    assert (x * 2).grad_fn is not None


@distributed(world_size=2, backends=TORCH)
def test_a_mark_lives_until_its_backward_and_not_beyond_a_write(world: World) -> None:
    mesh = _line(world)
    w = distribute_tensor(torch.ones(4, device=world.device, requires_grad=True), mesh, [Replicate()])
    x = distribute_tensor(torch.ones(5, 4, device=world.device), mesh, [Shard(0)])
    loss = (w * x).sum() + (w * x * 2).sum()
    assert len(w._marks.by_dims) == 1
    first = w._marks.by_dims[(0,)].marked
    with torch.no_grad():
        w.to_local().mul_(2)
    again = (w * x).sum()
    assert w._marks.by_dims[(0,)].marked is not first
    again.backward()
    assert w._marks.by_dims == {}
    with torch.no_grad():
        _ = w * x
    assert w._marks.by_dims == {}
    del loss


@distributed(world_size=2, backends="torch")
def test_values_gradients_and_placements_agree_with_torchs_own(world: World) -> None:
    from torch.distributed import tensor as oracle

    mesh = _line(world)
    theirs = torch.distributed.init_device_mesh("cpu", (2,))
    convert = {
        Shard(0): oracle.Shard(0),
        Shard(1): oracle.Shard(1),
        Replicate(): oracle.Replicate(),
        Partial(): oracle.Partial(),
    }
    a, b = _tensors("mm")["x"], _tensors("mm")["other"]
    for at_a, at_b in (
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Replicate()),
    ):
        ours = [distribute_tensor(t.clone().requires_grad_(), mesh, [p]) for t, p in ((a, at_a), (b, at_b))]
        other = [
            oracle.distribute_tensor(t.clone(), theirs, [convert[p]]).requires_grad_()
            for t, p in ((a, at_a), (b, at_b))
        ]
        mine, other_result = ours[0] @ ours[1], other[0] @ other[1]
        assert [convert[p] for p in mine.placements] == list(other_result.placements)
        mine.sum().backward()
        other_result.sum().backward()
        for x, y in zip(
            (mine, ours[0].grad, ours[1].grad), (other_result, other[0].grad, other[1].grad), strict=True
        ):
            assert_parity(x, y.full_tensor(), rtol=TOLERANCE, name=f"{at_a} {at_b}")


@distributed(world_size=2, backends=TORCH)
def test_a_keyword_that_asks_for_writing_writes(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = torch.tensor([[-1.0, 2.0], [3.0, -4.0], [-5.0, 6.0]], dtype=torch.float64, device=world.device)
    modules = [
        torch.nn.ReLU(True),
        torch.nn.LeakyReLU(0.1, True),
        torch.nn.ELU(0.5, True),
        torch.nn.Hardtanh(inplace=True),
    ]
    for module in modules:
        for placement in (Replicate(), Shard(0), Shard(1), Partial()):
            plain = whole.clone().requires_grad_()
            leaf = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
            y, x = plain.clone(), leaf.redistribute(placements=[placement]).clone()
            module(y), module(x)
            label = f"{module} of {placement}"
            assert x.placements == (placement,), label
            assert_parity(x.full_tensor(), y, exact=True, name=label)
            y.sum().backward()
            x.sum().backward()
            assert_parity(
                leaf.grad.full_tensor(), plain.grad, rtol=1e-14, atol=0, name=f"gradient of {label}"
            )
    x, plans = distribute_tensor(whole, mesh, [Shard(0)]), leaf._spec.plans
    modules[0](x)
    count = len(plans)
    for _ in range(5):
        modules[0](x)
    assert len(plans) == count


@distributed(world_size=2, backends=TORCH)
def test_writes_whose_operands_lie_otherwise_have_the_gradients_of_the_unsharded_program(
    world: World,
) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x, y = (
        torch.arange(1.0, 7.0, dtype=torch.float64, device=world.device).reshape(3, 2) + i for i in (0, 3)
    )
    plain = [v.clone().requires_grad_() for v in (x, y)]
    leaves = [distribute_tensor(v, mesh, [Replicate()]).requires_grad_() for v in (x, y)]
    target = leaves[0].clone()
    target.mul_(leaves[1].redistribute(placements=[Partial()]))
    plain[0].clone().mul_(plain[1]).square().sum().backward()
    target.square().sum().backward()
    for found, expected in zip(leaves, plain, strict=True):
        assert_parity(found.grad.full_tensor(), expected.grad, rtol=1e-13, atol=0)
    summands = leaves[0].detach().redistribute(placements=[Partial()])
    assert_parity(summands.eq_(4.0).full_tensor(), x.clone().eq_(4.0), exact=True)


@distributed(world_size=2, backends=TORCH)
def test_rows_of_truth_values_are_truth_values(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = torch.arange(15, device=world.device).reshape(5, 3) % 4 > 1
    places = torch.tensor([4, 0], device=world.device)
    x, at = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(places, mesh, [Replicate()])
    calls: dict[str, Any] = {
        "a row": lambda x, at: x[0],
        "rows": lambda x, at: x[1:3],
        "a part": lambda x, at: x.narrow(0, 3, 2),
        "one": lambda x, at: x.select(0, 4),
        "rows by number": lambda x, at: x[at],
        "slices by number": lambda x, at: x.index_select(0, at),
        "elements by number": lambda x, at: x.gather(0, at.reshape(2, 1)),
        "or": lambda x, at: x[0] | x[4],
        "as numbers": lambda x, at: x[0].double() + x[1].sum(),
    }
    for name, call in calls.items():
        assert_parity(call(x, at).full_tensor(), call(whole, places), exact=True, name=name)


@distributed(world_size=2, backends=TORCH)
def test_arguments_with_lists_in_them_are_mistakes_of_values(world: World) -> None:
    x = distribute_tensor(torch.ones(2, 3), init_device_mesh(world.device_type, (2,)), [Shard(0)])
    with pytest.raises(
        ValueError, match=r"view of a DTensor got an argument with which rule 'view' can do nothing"
    ):
        x.view(([3, 2],))


@distributed(world_size=2, backends=TORCH)
def test_squeezing_no_dim_squeezes_nothing(world: World) -> None:
    x = distribute_tensor(torch.ones(1, 3, 1), init_device_mesh(world.device_type, (2,)), [Shard(1)])
    assert x.squeeze(()).shape == (1, 3, 1)


@distributed(world_size=2, backends=TORCH)
def test_conjugates_travel_as_what_they_are(world: World) -> None:
    whole = torch.complex(*(torch.arange(6.0, device=world.device).reshape(3, 2) + i for i in (0, 1)))
    for dim in (0, 1):
        x = distribute_tensor(whole, init_device_mesh(world.device_type, (2,)), [Shard(dim)])
        assert_parity(x.adjoint().full_tensor(), whole.adjoint().resolve_conj(), exact=True)
