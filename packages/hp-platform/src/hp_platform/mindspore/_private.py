"""Every private name of MindSpore that this backend uses, looked up once, so that another MindSpore version fails at start-up.

MindSpore's torch-style engine (leaves that gather gradients, hooks on tensors, Functions) is complete in 2.10.0, but most
of its doors are private. No other file of the backend touches a name with a leading underscore that is MindSpore's.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import mindspore
import mindspore.communication.management
import numpy
from mindspore.mint.distributed import distributed as _distributed

VERSION = "2.10.0"
"""The version that all of this was tried with."""

NAMES: tuple[tuple[str, str], ...] = (
    ("mindspore", "_c_expression.run_backward"),
    ("mindspore", "_no_grad"),
    ("mindspore.graph.api", "_pynative_executor.set_grad_flag"),
    ("mindspore.graph.api", "_pynative_executor.grad_flag"),
    ("mindspore.graph.api", "_pynative_executor.set_enable_grad"),
    ("mindspore.graph.api", "_pynative_executor.enable_grad"),
    ("mindspore.graph.api", "_pynative_executor.queue_backward_final_callback"),
    ("mindspore.graph.api", "_pynative_executor.sync"),
    ("mindspore.common.tensor", "_init"),
    ("mindspore.common", "_unsafe_preserve_version_counter"),
    ("mindspore.common._grad_function", "_Function.apply"),
    ("mindspore", "Tensor._grad"),
    ("mindspore", "Tensor._grad_node"),
    ("mindspore", "Tensor._is_leaf"),
    ("mindspore", "Tensor._requires_grad"),
    ("mindspore", "Tensor._update_data"),
    ("mindspore", "nn.Cell._self_check"),
    ("mindspore", "nn.Cell._init_check"),
    ("mindspore", "nn.Cell._load_state_dict_pre_hooks"),
    ("mindspore", "nn.Cell._load_state_dict_post_hooks"),
    ("mindspore.common.seed", "_KERNEL_SEED"),
    ("mindspore.common.seed", "_GLOBAL_SEED"),
    ("mindspore.communication.management", "_init_with_store"),
    ("mindspore.mint.distributed.distributed", "get_cache_group_rank"),
    ("mindspore.mint.distributed.distributed", "get_cache_group_size"),
)
"""Module and dotted name. Underscored instance attributes of Cell (``_params``, ``_cells``, ``_buffers``) are tried on a cell."""


def check(names: Iterable[tuple[str, str]] = NAMES, numpy_version: str = numpy.__version__) -> None:
    """RuntimeError, saying what to install, where a name is missing or numpy is one that MindSpore cannot run with."""
    if int(numpy_version.partition(".")[0]) >= 2:
        raise RuntimeError(
            f"MindSpore {mindspore.__version__} is compiled against NumPy 1.x and fails in its first operation with NumPy "
            f"{numpy_version}; install 'numpy<2'"
        )
    missing = [f"{module}.{name}" for module, name in names if not _has(module, name)]
    cell = mindspore.nn.Cell()
    missing = missing + [f"mindspore.nn.Cell().{name}" for name in _CELL_TABLES if not hasattr(cell, name)]
    if missing:
        raise RuntimeError(
            f"MindSpore {mindspore.__version__} lacks what this backend uses of MindSpore {VERSION}: {', '.join(missing)}; "
            f"install 'mindspore=={VERSION}'"
        )


_CELL_TABLES = ("_params", "_cells", "_buffers")


def _has(module: str, name: str) -> bool:
    try:
        operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


check()

# --- the engine
run_backward = mindspore._c_expression.run_backward
executor = importlib.import_module("mindspore.graph.api")._pynative_executor
Function = importlib.import_module("mindspore.common._grad_function")._Function

grad_node = operator.attrgetter("_grad_node")
get_grad = operator.attrgetter("_grad")


def set_grad(x: mindspore.Tensor, grad: mindspore.Tensor | None) -> None:
    """Put the gradient of a leaf."""
    x._grad = grad


def keeps_grad(x: mindspore.Tensor) -> bool:
    """Whether its class, derived from Tensor, keeps gradients in a place of its own: behind a property ``grad``."""
    return isinstance(getattr(type(x), "grad", None), property)


def requires_grad(x: mindspore.Tensor) -> bool:
    """Whether a gradient flows to ``x``. Of a class that keeps gradients by itself it says so: the engine knows the shell only."""
    return bool(x.requires_grad if keeps_grad(x) else x._requires_grad)


def is_leaf(x: mindspore.Tensor) -> bool:
    """Whether no recorded operation made ``x``; likewise."""
    return bool(x.is_leaf if keeps_grad(x) else x._is_leaf)


def update_data(x: mindspore.Tensor, data: mindspore.Tensor) -> None:
    """Let the object ``x`` stand for the memory of ``data``; shape, strides and dtype follow, leaf and hooks stay."""
    x._update_data(data)


def preserve_version(xs: Iterable[mindspore.Tensor]) -> Any:
    """Context in which writes do not count for the engine's check of saved tensors."""
    return mindspore.common._unsafe_preserve_version_counter(tuple(xs))


def leaf_nodes(outputs: Iterable[mindspore.Tensor]) -> list[Any]:
    """The nodes at the ends of the graph behind ``outputs``, each once: where gradients are gathered."""
    waiting = [grad_node(x) for x in outputs]
    seen: set[int] = set()
    leaves = []
    while waiting:
        node = waiting.pop()
        if node is None or node._unique_id() in seen:
            continue
        seen.add(node._unique_id())
        if node.is_leaf():
            leaves.append(node)
        waiting.extend(edge[0] for edge in node.next_functions)
    return leaves


def own_copy(x: mindspore.Tensor) -> mindspore.Tensor:
    """A differentiable, contiguous copy in memory of its own: a plain tensor.

    ``Parameter.copy`` makes another parameter outside of the graph, so a parameter is viewed as a tensor first.
    """
    return (x.view(x.shape) if isinstance(x, mindspore.Parameter) else x).copy()


# --- subclasses of Tensor
_tensors: Any = importlib.import_module("mindspore.common.tensor")


def watch_constructor(look: Callable[[Any], None]) -> None:
    """Let ``look`` see first what every ``mindspore.Tensor(data)`` is made of; it may raise.

    The constructor copies what a subclass stands for in C++ and asks the object nothing, so it could refuse nowhere else.
    """
    init = _tensors._init

    def watched(input_data: Any = None, *args: Any, **kwargs: Any) -> Any:
        look(input_data)
        return init(input_data, *args, **kwargs)

    _tensors._init = watched


def stack_tuples() -> None:
    """Let ``Stack`` turn a list of tensors into a tuple: in tuples MindSpore looks for subclasses that dispatch.

    ``Stack`` is the last function on tensors in lists that is of the oldest kind, which does not look into lists.
    """
    mindspore.ops.Stack.__call__ = _stacked


def _stacked(primitive: Any, tensors: Any) -> Any:
    given = tuple(tensors) if isinstance(tensors, list) else tensors
    return mindspore.ops.Primitive.__call__(primitive, given)


def wrap_function(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let ``around(function)`` stand for ``mindspore.ops.<name>``, in every module of MindSpore that holds it.

    For functions in Python that ask a tensor for its shape and dtype only, so that nothing of them dispatches. Who imported
    the function by name before has the old one.
    """
    function = getattr(mindspore.ops, name)
    wrapped = functools.wraps(function)(around(function))
    for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "mindspore"]:
        if vars(module).get(name) is function:
            setattr(module, name, wrapped)


# --- cells
def params_of(cell: mindspore.nn.Cell) -> dict[str, mindspore.Parameter | None]:
    """A cell's own parameters."""
    return cell._params


def cells_of(cell: mindspore.nn.Cell) -> dict[str, mindspore.nn.Cell | None]:
    """A cell's direct children."""
    return cell._cells


def buffers_of(cell: mindspore.nn.Cell) -> dict[str, mindspore.Tensor | None]:
    """A cell's own buffers."""
    return cell._buffers


def loading_hooks_of(cell: mindspore.nn.Cell) -> tuple[list[Any], list[Any]]:
    """What was registered to run before and after the cell reads a state dict."""
    return [*cell._load_state_dict_pre_hooks.values()], [*cell._load_state_dict_post_hooks.values()]


class FreelyNamedCell(mindspore.nn.Cell):
    """A cell that does not look into the names that its parameters carry: here names are those of the attributes.

    MindSpore insists at the first call that ``Parameter.name`` is unique in the whole tree, which fails for modules that
    were put in another's place.
    """

    def _self_check(self) -> None:
        """Nothing to insist on."""

    def _init_check(self) -> None:
        """Parameters hold data from the start."""


# --- random numbers
# The package also has a function of this name, which hides the module from attribute access.
_seeds: Any = importlib.import_module("mindspore.common.seed")


def get_seeds() -> tuple[int | None, dict[Any, int]]:
    """The global seed, and how far each kind of random operation has come with it."""
    return _seeds._GLOBAL_SEED, dict(_seeds._KERNEL_SEED)


def set_seeds(state: tuple[int | None, dict[Any, int]]) -> None:
    """Put back what :func:`get_seeds` gave."""
    _seeds._GLOBAL_SEED = state[0]
    _seeds._KERNEL_SEED.clear()
    _seeds._KERNEL_SEED.update(state[1])


# --- communication
init_with_store = mindspore.communication.management._init_with_store
"""``init_process_group`` refuses every device but Ascend; this takes the others as well, and a store."""


def name_world_group(name: str) -> None:
    """Tell point-to-point functions the name of the world.

    Their default argument was bound to Ascend's name when MindSpore was imported, so on CPU they look for a group that
    does not exist.
    """
    for function in (_distributed.get_cache_group_rank, _distributed.get_cache_group_size):
        # A cached function keeps its defaults on what it wraps.
        getattr(function, "__wrapped__", function).__defaults__ = (name,)
