"""Values of DTensors: read on the host, and new ones of the same kind."""

from __future__ import annotations

from typing import Any

from hp_dtensor.base import DTensorBase
from hp_dtensor.placements import REPLICATE
from hp_dtensor.spec import make_spec, shown
from hp_platform import get_platform

Tensor = Any


class ValueMethods(DTensorBase):
    """Reading values, and making tensors like this one."""

    __slots__ = ()

    # ------------------------------------------------------------------------------------------------------------- read
    def item(self) -> Any:
        """The number in a tensor of one element, the same on all ranks, which all call. Communication: :meth:`full_tensor`."""
        if self.numel() != 1:
            raise ValueError(f"item() of a DTensor of shape {self._spec.shape}: it needs exactly one element")
        return self._on_host().item()

    def tolist(self) -> Any:
        """The values of the whole as nested lists, on all ranks, which all call. Communication: :meth:`full_tensor`."""
        return self._on_host().tolist()

    def _on_host(self) -> Any:
        platform = get_platform()
        detached = self._wrap(platform.detach(self._local), self._spec)
        return platform.to_numpy(detached.full_tensor())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self, **_: Any) -> str:
        # Values would need communication, and a repr must not hang.
        platform = get_platform()
        grad = ", requires_grad=True" if platform.requires_grad(self._local) else ""
        return (
            f"DTensor(shape={self._spec.shape}, dtype={platform.dtype_name(self._local.dtype)}, "
            f"placements={shown(self._spec.placements)}, mesh={self._spec.mesh}, "
            f"local_shape={self._spec.local_shape}{grad})"
        )

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if format_spec else repr(self), format_spec)

    # -------------------------------------------------------------------------------------------------------------- new
    def new_zeros(
        self, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Any:
        """Zeros of any shape, Replicate on this tensor's mesh, with its dtype and device unless given."""
        return self._new(0, size, dtype, device, requires_grad)

    def new_ones(self, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        """Ones of any shape, Replicate on this tensor's mesh, with its dtype and device unless given."""
        return self._new(1, size, dtype, device, requires_grad)

    def new_full(
        self,
        size: Any,
        fill_value: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        requires_grad: bool = False,
    ) -> Any:
        """One value in any shape, Replicate on this tensor's mesh, with its dtype and device unless given."""
        return self._new(fill_value, (size,), dtype, device, requires_grad)

    def new_tensor(
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Any:
        """A copy of ``data``, equal on all ranks, Replicate on this tensor's mesh, with its dtype and device unless given."""
        platform = get_platform()
        where = str(device or platform.device_of(self._local))
        local = platform.tensor(data, self._local.dtype if dtype is None else dtype, where)
        made = self._wrap(local, _replicated(self._spec, tuple(local.shape)))
        return made.requires_grad_(True) if requires_grad else made

    def _new(self, value: Any, size: Any, dtype: Any, device: Any, requires_grad: bool) -> Any:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        platform = get_platform()
        dtype = self._local.dtype if dtype is None else dtype
        local = platform.full(shape, value, dtype, str(device or platform.device_of(self._local)))
        made = self._wrap(local, _replicated(self._spec, shape))
        return made.requires_grad_(True) if requires_grad else made

    def type_as(self, other: Any) -> Any:
        """This tensor in the dtype of ``other``. ValueError if ``other`` lies on another device, or this one is a sum."""
        platform = get_platform()
        if any(p.is_partial() for p in self._spec.placements):
            raise ValueError(
                f"type_as of a DTensor with placements {shown(self._spec.placements)}: call reduce_partial() first"
            )
        theirs = other._local if isinstance(other, DTensorBase) else other
        mine, wanted = platform.device_of(self._local), platform.device_of(theirs)
        if mine != wanted:
            raise ValueError(
                f"type_as of a DTensor on {mine} with a tensor on {wanted}: it changes the dtype only"
            )
        return self if theirs.dtype == self._local.dtype else self.to(theirs.dtype)  # type: ignore[attr-defined]


def _replicated(spec: Any, shape: tuple[int, ...]) -> Any:
    return make_spec(spec.mesh, (REPLICATE,) * len(spec.placements), shape)
