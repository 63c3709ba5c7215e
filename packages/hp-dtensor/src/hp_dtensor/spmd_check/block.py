"""``check_spmd``: the block in which every operation is verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hp_dtensor.spmd_check.agreement import Tolerance
from hp_dtensor.spmd_check.watcher import Watcher
from hp_platform import _process, get_platform


@contextmanager
def check_spmd(model: Any = None, *, rtol: float | None = None, atol: float | None = None) -> Iterator[None]:
    """Find the first operation whose values or gradients are not what their placements declare. For debugging: it is slow.

    ::

        with check_spmd(model):
            loss = model(x).sum()
            loss.backward()

    Inside, every operation that is dispatched for DTensors is verified:

    1. Arguments and results: along every mesh dim where they are Replicate, all ranks hold the same values.
    2. Results: each is the piece of what the framework's function gives for the whole tensors; a Partial by its reduction.
    3. Gradients, in a backward inside of the block, of results and of leaves that were arguments: where they are declared
       Replicate (those of Replicate and of sums), all ranks hold the same.

    The first lie raises the same RuntimeError on all ranks of the mesh: with the function, the module, the mesh dim, the ranks
    that differ from the first one there, the largest difference, the declared placements, and what to look at.

    Not compared with the unsharded operation (2), but still by 1 and 3: random operations (dropout, ``rand_like``,
    ``normal_`` ...), which would draw other values, and a ``DFunction`` whose forward communicates. Not compared at all:
    ``empty_like``, tensors on the meta device, and what is no operation of the dispatch; the results of ``redistribute`` and
    of optimizers' functions on lists are looked at where the next operation takes them.

    Blocks may be nested, the innermost counts; it holds for this thread and asynchronous task only, backward's threads
    included. On leaving it all hooks are removed, so ``backward()`` belongs inside.

    Args:
        model: a module whose sub-modules' names the messages shall have. Default: none.
        rtol: allowed difference as a share of the largest magnitude among arguments and results (of replicas: among the
            values); default by dtype: 1e-10 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16. Integers and
            bools must be equal. NaN equals NaN.
        atol: allowed difference in addition; default 0.

    Communication, per operation: one broadcast of the piece per tensor and Replicate mesh dim, ``full_tensor()`` of the
    arguments, the reduction of Partial results, and up to three all-reduces per mesh dim of 4 bytes per rank and check; in
    backward one broadcast per gradient and Replicate mesh dim, and such an all-reduce. All ranks of the mesh must run the same operations.
    ValueError for a negative tolerance.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ValueError(
                f"check_spmd: {name} is a number of at least 0, or None for the default; got {value!r}"
            )
    watcher = Watcher(Tolerance(rtol, 0.0 if atol is None else atol))
    if model is not None:
        _name_modules(watcher, model)
    token = _process.spmd_watcher.set(watcher)
    _process.open_modes.add(1)
    try:
        yield
    finally:
        _process.open_modes.add(-1)
        _process.spmd_watcher.reset(token)
        watcher.close()


def _name_modules(watcher: Watcher, model: Any) -> None:
    """Hooks that keep the names of the modules that are running."""
    platform = get_platform()
    for name, module in platform.named_modules(model):
        shown = f"{name!r} ({type(module).__name__})" if name else type(module).__name__

        def enter(module: Any, args: Any, kwargs: Any, shown: str = shown) -> None:
            watcher.modules.append(shown)

        def leave(module: Any, args: Any, kwargs: Any, output: Any, shown: str = shown) -> None:
            # What an error of an inner module has left behind goes as well.
            while watcher.modules and watcher.modules.pop() != shown:
                pass

        # First of all and last of all: what styles do at a module's door belongs to the module.
        watcher.handles.append(platform.register_forward_pre_hook(module, enter, prepend=True))
        watcher.handles.append(platform.register_forward_hook(module, leave))
