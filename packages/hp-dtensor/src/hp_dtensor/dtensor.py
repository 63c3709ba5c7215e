"""DTensor: a tensor of the whole program of which every rank holds a piece. What is the same on all frameworks.

A DTensor has a plain local tensor (``_local``), which carries the gradient's graph, and a spec (``_spec``). The classes of
the frameworks, in the adapters, add how their functions are caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor import creation
from hp_dtensor.base import DTensorBase
from hp_dtensor.gradients import GradientMethods
from hp_dtensor.layout import Layout, mesh_and_placements
from hp_dtensor.layout import _interned as layout_of
from hp_dtensor.marks import marked
from hp_dtensor.pickling import PickleMethods
from hp_dtensor.placements import REPLICATE, Partial, Placement
from hp_dtensor.redistributed import redistributed
from hp_dtensor.spec import resolve, shown
from hp_dtensor.strides import whole_strides
from hp_dtensor.values import ValueMethods

if TYPE_CHECKING:
    from hp_platform import DeviceMesh

Tensor = Any


class DTensorMethods(GradientMethods, ValueMethods, PickleMethods, DTensorBase):
    """The methods and attributes of DTensors that all frameworks share.

    Attributes of the whole: ``shape``, ``ndim``, ``dtype``, ``device``, ``requires_grad``. How it lies:
    ``device_mesh``, ``placements`` (one per mesh dim), ``layout``, ``local_shape``. Pieces: :meth:`from_local`,
    :meth:`to_local`, :meth:`full_tensor`, :meth:`redistribute`, :meth:`reduce_partial`.
    """

    __slots__ = ()

    # ------------------------------------------------------------------------------------------------ from and to local
    @classmethod
    def from_local(
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh | Layout,
        placements: Sequence[Any] | Layout | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> Any:
        """The DTensor whose piece on this rank is ``local_tensor``. All ranks of the mesh call.

        Args:
            local_tensor: a plain tensor, kept as it is: ``to_local()`` returns it, and gradients flow to it. The gradient of
                a Shard is the own shard; of a Replicate, and of every summand of a sum, the whole gradient.
            device_mesh: where it lies; a :class:`hp_dtensor.Layout` says mesh and placements.
            placements: one per mesh dim, or aliases (one per tensor dim), or a Layout.
            run_check: whether the ranks compare dtypes, local shapes and placements, and Replicate values are taken from the
                first rank along each mesh dim.
            shape: the global shape; needed for a RaggedShard. Without it the ranks tell each other their sizes along the dims that are cut, so that
                uneven shards come out right, too.
            stride: the strides of the whole in elements, for which ``shape`` is needed. They follow from the local tensor's
                (see :meth:`stride`), so that is checked only.

        Communication: without ``shape`` one all-gather of ``ndim`` integers per mesh dim that cuts (and the host waits for
        it), none with it; with ``run_check`` in addition one gather of objects, and one broadcast per Replicate mesh dim.
        ValueError if ``local_tensor`` is no plain tensor, or its shape is not this rank's piece by the chunk rule.
        """
        mesh, given = mesh_and_placements(device_mesh, placements)
        return cls._wrap(*creation.checked_local(local_tensor, mesh, given, shape, stride, run_check))

    @classmethod
    def from_local_with_layout(cls, local_tensor: Tensor, layout: Layout) -> Any:
        """:meth:`from_local` for evenly cut tensors: the global shape follows from this rank's, so there is no communication."""
        return cls.from_local(local_tensor, layout, shape=layout.get_global_shape(tuple(local_tensor.shape)))

    def __hp_local__(self) -> Tensor:
        """See :class:`hp_platform.protocols.local_wrapper.LocalWrapper`."""
        return self._local

    def __hp_rewrap__(self) -> Callable[[Tensor], Any]:
        """See :class:`hp_platform.protocols.local_wrapper.LocalWrapper`."""
        wrap, spec = type(self)._wrap, self._spec
        return lambda local: wrap(local, spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's piece: the very tensor, with its graph. No communication.

        ``grad_placements`` says how the gradient that will flow into it lies. The default: a Shard's like the shard; a
        Replicate's and a sum's the same whole gradient on all ranks. Give Partial() where this tensor is Replicate and every
        rank goes on with it differently: the gradients are then summed. ValueError for anything else.
        """
        if grad_placements is None:
            return self._local
        given = resolve(self._spec.mesh, grad_placements, len(self._spec.shape))
        differs = []
        for dim, (own, usual, wanted) in enumerate(
            zip(self._spec.placements, self._spec.grad.placements, given, strict=True)
        ):
            if own.is_replicate() and wanted.is_partial("sum"):
                differs.append(dim)
            elif wanted != usual:
                raise ValueError(
                    f"grad_placements {shown(given)}: the gradient of {own} along mesh dim {dim} is {usual}"
                    + (", or Partial('sum')" if own.is_replicate() else "")
                    + f", not {wanted}; redistribute() first, or give {usual}"
                )
        dims = tuple(dim for dim in differs if self._spec.mesh.shape[dim] > 1)
        return marked(self, dims) if dims else self._local

    # -------------------------------------------------------------------------------------------------- redistribution
    def redistribute(
        self,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Any] | Layout | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """The same tensor in other placements, any to any. Differentiable. All ranks of the mesh call.

        Args:
            device_mesh: default: the tensor's own. Another mesh must have the same ranks, in any shape and order; for other
                ranks see :func:`hp_dtensor.transfer`. A :class:`hp_dtensor.Layout` says mesh and placements.
            placements: one per mesh dim, or aliases, or a Layout; None: Replicate everywhere.
            async_op: return a :class:`hp_dtensor.redistributed.Redistribution`, whose ``wait()`` gives the DTensor; the first
                collective runs meanwhile where the platform supports "async_collectives". On another mesh nothing runs ahead.

        Communication, per mesh dim that changes: Partial to Replicate one all-reduce, Partial to Shard one reduce-scatter,
        Shard to Replicate one all-gather, Shard to Shard one all-to-all; Replicate to Shard, and anything to Partial, none. Of
        the ways that lead to the placements the one with the fewest bytes is taken: :func:`hp_dtensor.redistribute_plan` shows
        it. Another cut order, and another mesh, cost one all-to-all over all ranks. Backward: the adjoint.
        ValueError for arguments that do not fit.
        """
        mesh, wanted = mesh_and_placements(device_mesh, placements)
        return redistributed(self, mesh, wanted, async_op)

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one, on every rank; differentiable. Communication: :meth:`redistribute` to Replicate."""
        return self.redistribute()._local

    def reduce_partial(self) -> Any:
        """The same tensor without Partial: those dims become Replicate, the others stay. One all-reduce per Partial dim."""
        return self.redistribute(
            placements=[REPLICATE if isinstance(p, Partial) else p for p in self._spec.placements]
        )

    # ------------------------------------------------------------------------------------------------------ what it is
    @property
    def placements(self) -> tuple[Placement, ...]:
        """One per mesh dim; dims of Shard are not negative."""
        return self._spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lies on."""
        return self._spec.mesh

    @property
    def layout(self) -> Layout:
        """Mesh and placements as one value."""
        return layout_of(self._spec.mesh, self._spec.placements, len(self._spec.shape), None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._spec.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        return self._spec.local_shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the local tensor, which is that of all pieces."""
        return self._local.dtype

    @property
    def device(self) -> Any:
        """The device of the local tensor."""
        return self._local.device

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether it is Partial along any mesh dim; with ``reduce_op``: of that reduction."""
        return any(p.is_partial(reduce_op) for p in self._spec.placements)

    def stride(self, dim: int | None = None) -> Any:
        """The strides of the whole in elements, or one of them, as if it lay densely with its dims in the local's order."""
        strides = whole_strides(self._local.stride(), self._spec.shape)
        return strides if dim is None else strides[dim]

    def dim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Number of elements of the whole."""
        return math.prod(self._spec.shape)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        if not self._spec.shape:
            raise ValueError("a 0-d DTensor has no length")
        return self._spec.shape[0]

    __hash__ = object.__hash__


def local_tensors(dtensors: Iterable[DTensorMethods]) -> list[Tensor]:
    """What ``to_local()`` of each gives: for runtimes that ask all of their parameters at every step."""
    return [x._local for x in dtensors]
