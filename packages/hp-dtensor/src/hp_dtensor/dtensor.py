"""DTensor: a tensor of the whole program of which every rank holds a piece. What is the same on all frameworks.

A DTensor has a plain local tensor (``_local``), which carries the gradient's graph, and a spec (``_spec``). The classes of
the frameworks, in the adapters, add how their functions are caught.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor import creation
from hp_dtensor.marks import Marks, mark
from hp_dtensor.placements import REPLICATE, Partial, Placement
from hp_dtensor.redistribution import moves_between, run_moves
from hp_dtensor.spec import Spec, make_spec, resolve, shown
from hp_platform import get_platform

if TYPE_CHECKING:
    from hp_platform import DeviceMesh

Tensor = Any


class DTensorMethods:
    """The methods and attributes of DTensors that all frameworks share."""

    __slots__ = ()

    _local: Tensor
    _spec: Spec
    _marks: Marks | None
    _grad_dtensor: Any
    """The DTensor around the local tensor's gradient, so that ``x.grad is x.grad``."""

    if TYPE_CHECKING:

        @staticmethod
        def _wrap(local: Tensor, spec: Spec) -> Any:
            """The DTensor of a local tensor; the frameworks' classes have it."""

    # ------------------------------------------------------------------------------------------------ from and to local
    @classmethod
    def from_local(
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Any:
        """The DTensor whose piece on this rank is ``local_tensor``. All ranks of the mesh call.

        Args:
            local_tensor: a plain tensor, kept as it is: ``to_local()`` returns it, and gradients flow to it. The gradient of
                a Shard is the own shard; of a Replicate, and of every summand of a sum, the whole gradient.
            device_mesh: where it lies.
            placements: one per mesh dim.
            run_check: whether the ranks compare dtypes, local shapes and placements, and Replicate values are taken from the
                first rank along each mesh dim.
            shape: the global shape. Without it the ranks tell each other their sizes along the dims that are cut, so that
                uneven shards come out right, too.

        Communication: without ``shape`` one all-gather of ``ndim`` integers per mesh dim that cuts (and the host waits for
        it), none with it; with ``run_check`` in addition one gather of objects, and one broadcast per Replicate mesh dim.
        ValueError if ``local_tensor`` is no plain tensor, or its shape is not this rank's piece by the chunk rule.
        """
        return cls._wrap(*creation.checked_local(local_tensor, device_mesh, placements, shape, run_check))

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
        return mark(self._local, self._spec, dims) if dims else self._local

    # -------------------------------------------------------------------------------------------------- redistribution
    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> Any:
        """The same tensor in other placements, any to any. Differentiable. All ranks of the mesh call.

        ``device_mesh`` may be left out; it must be the tensor's own (ValueError). ``placements`` None: Replicate everywhere.

        Communication, per mesh dim that changes: Partial to Replicate one all-reduce, Partial to Shard one reduce-scatter,
        Shard to Replicate one all-gather, Shard to Shard one all-to-all; Replicate to Shard, and anything to Partial, none.
        Where several mesh dims cut one tensor dim, inner cuts may have to be joined and made again. Backward: the adjoint.
        """
        spec = self._spec
        if device_mesh is not None and device_mesh != spec.mesh:
            raise ValueError(
                f"redistribute stays on the tensor's own mesh {spec.mesh}, got {device_mesh}: for another mesh go through "
                f"full_tensor() and distribute_tensor()"
            )
        wanted = (REPLICATE,) * len(spec.placements) if placements is None else placements
        target = make_spec(spec.mesh, wanted, spec.shape)
        if target is spec:
            return self
        return self._wrap(run_moves(self._local, spec, moves_between(spec, target)), target)

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one, on every rank; differentiable. Communication: :meth:`redistribute` to Replicate."""
        return self.redistribute()._local

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

    # ------------------------------------------------------------------------------------------------------- gradients
    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return get_platform().requires_grad(self._local)

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Ask for the gradient of a leaf, or stop asking. ValueError for a Partial: its gradient would not lie as it does."""
        if requires_grad and any(isinstance(p, Partial) for p in self._spec.placements):
            raise ValueError(
                f"a leaf with placements {shown(self._spec.placements)} cannot be trained: its gradient is Replicate. "
                f"Redistribute it to Shard or Replicate first"
            )
        get_platform().set_requires_grad_(self._local, requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made it."""
        return get_platform().is_leaf(self._local)

    @property
    def grad(self) -> Any:
        """The gradient gathered so far, a DTensor: placed as this one, Replicate where this one is a sum."""
        gradient = get_platform().get_grad(self._local)
        if gradient is None:
            self._grad_dtensor = None
        elif self._grad_dtensor is None or not _is_same(self._grad_dtensor._local, gradient):
            self._grad_dtensor = self._wrap(gradient, self._spec.grad)
        return self._grad_dtensor

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None and not (isinstance(value, DTensorMethods) and value._spec is self._spec.grad):
            raise ValueError(f"the gradient must be a DTensor of {self._spec.grad}, or None; got {value!r}")
        get_platform().set_grad(self._local, None if value is None else value._local)
        self._grad_dtensor = value

    def backward(self, gradient: Any = None, retain_graph: bool | None = False) -> None:
        """Add the gradients of the unsharded program to the leaves. Nobody scales by the number of ranks.

        ``gradient`` None: one, for tensors with one element (ValueError otherwise). Else a DTensor of this shape, or a plain
        tensor with the whole gradient. Communication: what the operations' backwards need. All ranks of the mesh call.
        """
        x = self._averages_as_sums()
        platform = get_platform()
        if gradient is None:
            if self.numel() != 1:
                raise ValueError(
                    f"backward of a DTensor of shape {self._spec.shape} needs its gradient: reduce it to one element, or "
                    f"give gradient="
                )
            seed = platform.full(
                x._spec.local_shape, 1, dtype=x._local.dtype, device=platform.device_of(x._local)
            )
        else:
            if not isinstance(gradient, DTensorMethods):
                gradient = self._wrap(
                    gradient, make_spec(x._spec.mesh, (REPLICATE,) * len(x.placements), gradient.shape)
                )
            if gradient._spec.shape != self._spec.shape:
                raise ValueError(
                    f"gradient has shape {gradient._spec.shape}, the tensor {self._spec.shape}: they must be equal"
                )
            seed = gradient.redistribute(placements=x._spec.grad.placements)._local
        platform.backward([x._local], [seed], retain_graph=bool(retain_graph))

    def _averages_as_sums(self) -> Any:
        # The seed of an average would have to be cut by the number of ranks; that of a sum is the gradient itself.
        if not any(p.is_partial("avg") for p in self._spec.placements):
            return self
        return self.redistribute(
            placements=[Partial() if p.is_partial() else p for p in self._spec.placements]
        )

    def detach(self) -> Any:
        """The same memory outside of the graph."""
        return self._wrap(get_platform().detach(self._local), self._spec)

    # ---------------------------------------------------------------------------------------------------------- values
    def item(self) -> Any:
        """The number in a tensor of one element, the same on all ranks, which all call. Communication: :meth:`full_tensor`."""
        if self.numel() != 1:
            raise ValueError(f"item() of a DTensor of shape {self._spec.shape}: it needs exactly one element")
        platform = get_platform()
        return platform.to_numpy(self.detach().full_tensor()).item()

    def tolist(self) -> Any:
        """The values of the whole as nested lists, on all ranks, which all call. Communication: :meth:`full_tensor`."""
        return get_platform().to_numpy(self.detach().full_tensor()).tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self, **_: Any) -> str:
        # Values would need communication, and a repr must not hang.
        dtype = get_platform().dtype_name(self._local.dtype)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DTensor(shape={self._spec.shape}, dtype={dtype}, placements={shown(self._spec.placements)}, "
            f"mesh={self._spec.mesh}, local_shape={self._spec.local_shape}{grad})"
        )

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if format_spec else repr(self), format_spec)

    __hash__ = object.__hash__


def _is_same(known: Tensor, gradient: Tensor) -> bool:
    # MindSpore makes a new object around the same memory each time; the known one keeps that memory from being reused.
    data_ptr = get_platform().data_ptr
    return known is gradient or (known.shape == gradient.shape and data_ptr(known) == data_ptr(gradient))
