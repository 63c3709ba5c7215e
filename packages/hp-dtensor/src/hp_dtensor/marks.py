"""The marks of a tensor: identities whose backward sums the gradient of a Replicate that is used differently.

[Note: lifetime of a mark] Three projections of one activation must cost one reduction, so a mark is kept with its DTensor,
per set of mesh dims, while the local tensor is the same object at the same version and address (``local.data = other`` puts
other memory under it, which no version counts). It is not made where no gradient is recorded. Its own backward drops it:
kept over steps, all reductions of weights would run at the very end of backward and overlap would be lost. The mark knows
its keeper weakly, so that nothing lives in a cycle.

Styles of hp_tp keep what they make of plain tensors by rules of their own: see [Note: two keepers] in ``hp_tp.styles.shared``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from hp_dtensor import conversions
from hp_dtensor.faces import Gathered
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any


class _Kept(NamedTuple):
    marked: Tensor
    source: Tensor
    version: int
    address: int | None
    """None where writes are not counted: asking for it would wait for the device there."""

    def is_valid(self, local: Tensor, version: int) -> bool:
        if self.source is not local or self.version != version:
            return False
        return self.address is None or self.address == get_platform().data_ptr(local)


class Marks:
    """The marks of one DTensor."""

    __slots__ = ("__weakref__", "by_dims", "gathered")

    def __init__(self, gathered: Gathered | None = None) -> None:
        self.by_dims: dict[tuple[int, ...], _Kept] = {}
        self.gathered = gathered
        """See [Note: two faces] in :mod:`hp_dtensor.faces`."""

    def get(self, local: Tensor, spec: Spec, dims: tuple[int, ...]) -> Tensor:
        """``local`` behind the mark for these mesh dims, found or made."""
        platform = get_platform()
        version = platform.version(local)
        kept = self.by_dims.get(dims)
        if kept is None or not kept.is_valid(local, version):
            keeper = weakref.ref(self)

            def used() -> None:
                marks = keeper()
                if marks is not None:
                    marks.by_dims.pop(dims, None)

            address = platform.data_ptr(local) if platform.supports("version_counter") else None
            kept = _Kept(self._made(local, spec, dims, used), local, version, address)
            self.by_dims[dims] = kept
        return kept.marked

    def _made(self, local: Tensor, spec: Spec, dims: tuple[int, ...], used: Any) -> Tensor:
        gathered = self.gathered
        if gathered is None or not gathered.is_valid(local):
            return mark(local, spec, dims, used)
        varying = gathered.dims & frozenset(dims)
        if not varying:
            return mark(local, spec, dims, used)
        rest = tuple(dim for dim in dims if dim not in varying)
        if not rest:
            return gathered.face(varying, used)
        return mark(gathered.face(varying, None), spec, rest, used)


class Deferred(Marks):
    """Marks whose reductions are left to somebody else: ``leaf(dims)`` gives the local values for operations that differ along these
    mesh dims, as a tensor of its own that gathers what each rank adds to the gradient.
    """

    __slots__ = ("leaf",)

    def __init__(self, leaf: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.leaf = leaf

    def get(self, local: Tensor, spec: Spec, dims: tuple[int, ...]) -> Tensor:
        """Without a mark."""
        return self.leaf(dims)


def defer_reductions(x: Any, leaf: Callable[[tuple[int, ...]], Tensor]) -> None:
    """Let operations on the DTensor ``x`` that differ along mesh dims take their local values from ``leaf(dims)``, see
    :class:`Deferred`. Those that have ``x`` moved first, or use what was made of it, reduce by themselves as ever.
    """
    x._marks = Deferred(leaf)


def forget_marks(x: Any) -> None:
    """The memory of the DTensor ``x`` is about to be filled anew, perhaps in another place: what was made of it is not used again.

    For runtimes that free the memory below tensors: where it comes back to differs between ranks, and one that found its mark by the
    address while another makes one would reduce in another order. What defers reductions stays.
    """
    if x._marks is not None:
        x._marks.by_dims.clear()


def marked(x: Any, dims: tuple[int, ...]) -> Tensor:
    """The local tensor of the DTensor ``x`` for an operation that differs along these mesh dims."""
    local, platform = x._local, get_platform()
    if not (platform.requires_grad(local) and platform.is_grad_enabled()):
        return local
    if x._marks is None:
        x._marks = Marks()
    return x._marks.get(local, x._spec, dims)


def whole_gradient(x: Any, what: str) -> None:
    """Let the whole gradient of the DTensor ``x`` pass ``x`` itself, because ``what`` looks at it there.

    RuntimeError if a part of it already goes another way: see [Note: two faces] in :mod:`hp_dtensor.faces`.
    """
    marks = x._marks
    if marks is None or marks.gathered is None:
        return
    if marks.gathered.is_used:
        raise RuntimeError(
            f"{what} of a tensor that redistribute() has gathered was asked for after operations have used it: what flows "
            f"back from ranks that use it differently is scattered without passing it. Register a hook or call retain_grad() "
            f"right after redistribute(), before the tensor is used, or look at the tensor that was redistributed"
        )
    marks.gathered = None


def mark(local: Tensor, spec: Spec, dims: tuple[int, ...], used: Any = None) -> Tensor:
    """A new mark on a local tensor of ``spec``; the tensor itself where no gradient is recorded."""
    platform = get_platform()
    if not (platform.requires_grad(local) and platform.is_grad_enabled()):
        return local
    return conversions.mark(local, tuple(spec.mesh.get_group(dim) for dim in dims), used)
