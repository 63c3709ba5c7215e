"""What of torch arrives at DTensor's ``__torch_function__``: everything that is callable, but for the few that are listed here.

What arrives is dispatched by a rule, answered by the class, runs its Python body, or is refused by name. What goes below
Python meets ``__torch_dispatch__``, which only refuses.
"""

import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

SPACES = {
    "Tensor": torch.Tensor, "torch": torch, "functional": torch.nn.functional, "linalg": torch.linalg, "fft": torch.fft,
    "special": torch.special, "_nn": torch._C._nn, "init": torch.nn.init,
}  # fmt: skip
BELOW = {"Tensor.set_", "torch.tensor", "torch.sym_fresh_size"} | {
    f"torch.sparse_{kind}_tensor" for kind in ("bsc", "bsr", "compressed", "csc", "csr")
}
"""Functions that meet a DTensor below Python first. ``set_`` is a method of the class, the others are refused there."""
NOT_CALLED = """
    backward __new__ __class__ __init__ __init_subclass__ __subclasshook__ __getattribute__ __setattr__ __delattr__ __dir__
    __class_getitem__ _make_subclass _make_wrapper_subclass _dtensor__new__ __hash__ __sizeof__ __torch_function__
    __torch_dispatch__ __str__ __getstate__ compile export
"""


class ArrivedError(Exception):
    """A function has arrived at ``__torch_function__``."""


class BelowError(Exception):
    """A function has arrived at ``__torch_dispatch__``."""


def _arguments(x: Any) -> list[tuple[Any, ...]]:
    i = torch.tensor([0, 1])
    return [
        (x,), (x, x), (x, 0), (x, 0, x), (x, 0, i, x), (x, x, x), ([x, x],), (x, (2,)), (x, 0, 1), (x, 0, 1, 2), (x, 2.0), (x, "f"),
        (x, torch.float64), (x, [2, 8]), (x, i, x), (x, 0, i), (x, 0, i, 1.0), ([x], [x]), (x, lambda z: z), (0, x), ("ij->ji", x),
        (x, x, x, x), (x, x, x, x, x), (x, None), (x, x, 0), ([x], 0), ((4,), x), (x, x, 2),
    ]  # fmt: skip


def _callables() -> Iterator[tuple[str, Any]]:
    for space, home in SPACES.items():
        for name in sorted(set(dir(home)) - set(NOT_CALLED.split())):
            function = getattr(home, name, None)
            is_private = name.startswith("_") and not name.startswith(("__", "_foreach_", "_fused_"))
            if not callable(function) or isinstance(function, (type, types.ModuleType)):
                continue
            if space == "torch" and (is_private or not _is_operation(function)):
                continue
            yield f"{space}.{name}", function


def _is_operation(function: Any) -> bool:
    homes = (None, "torch", "torch.functional", "torch._VF", "torch._C._VariableFunctions", "torch._tensor")
    return isinstance(function, types.BuiltinFunctionType) or getattr(function, "__module__", "") in homes


def _way(name: str, function: Any, x: Any) -> str:
    """``arrived``, ``below``, ``silent`` (it gave a plain tensor like ``x``), or ``neither``: no arguments that we know suit it."""
    for args in _arguments(x):
        if name.startswith("Tensor.") and args[0] is not x:
            continue
        try:
            result = function(*args)
            if any(
                type(r) is torch.Tensor and r.shape == x.shape
                for r in torch.utils._pytree.tree_leaves(result)
            ):
                return "silent"
        except ArrivedError:
            return "arrived"
        except BelowError:
            return "below"
        except Exception as error:  # what suits no function's arguments
            causes = (error.__cause__, error.__context__)
            if any(isinstance(cause, ArrivedError) for cause in causes):
                return "arrived"
    return "neither"


@distributed(1, backends=["torch"])
def test_every_callable_of_torch_arrives_but_for_a_few(world: World) -> None:
    x = distribute_tensor(torch.rand(4, 4), init_device_mesh(world.device_type, (1,)), [Shard(0)])

    def arrive(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ArrivedError

    def slip(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise BelowError

    ways: dict[str, set[str]] = {"arrived": set(), "below": set(), "silent": set(), "neither": set()}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch about its own old functions
        patch.setattr(DTensor, "__torch_function__", classmethod(arrive))
        patch.setattr(DTensor, "__torch_dispatch__", classmethod(slip))
        for name, function in _callables():
            ways[_way(name, function, x)].add(name)
    assert ways["below"] == BELOW
    assert len(ways["arrived"]) > 1500
    assert ways["silent"] == set()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@distributed(2, backends=["torch"])
def test_what_goes_below_python_or_asks_for_memory_is_refused(world: World) -> None:
    x = distribute_tensor(torch.rand(4, 4), init_device_mesh(world.device_type, (2,)), [Shard(0)])
    assert x.data_ptr() == 0
    for call in (
        lambda: torch.tensor(x), lambda: torch.Tensor(x), lambda: torch.as_tensor(x, dtype=torch.float64),
        lambda: x.as_subclass(torch.Tensor), lambda: torch.from_dlpack(x), lambda: x.untyped_storage(), lambda: x.numpy(),
        lambda: x.share_memory_(), lambda: torch.ops.aten.gelu.default(x), lambda: torch._C._nn.gelu(x).numpy(),
        lambda: x.set_(torch.zeros(3)), lambda: torch.zeros(4, 4).add_(x).numpy(),
    ):  # fmt: skip
        with pytest.raises((NotImplementedError, ValueError), match="DTensor"):
            call()
