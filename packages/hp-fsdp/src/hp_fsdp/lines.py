"""What a reduction sends: for every rank a line with its chunks of all gradients, and a tail that is the same in all lines.

[Note: what travels] The tail holds the gradients of scalars (which are replicated, so every rank wants their mean), and one
number per parameter, 1 if this rank has a gradient for it, else 0. So after one collective every rank knows the mean
gradients of its shards and of all scalars, and which parameters no rank has used. Larger parameters that are not cut would
be sent to every rank there; their gradients travel by themselves, in one all-reduce, and stand behind the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_fsdp.layout import Slot
from hp_fsdp.parameter import ManagedParameter
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor

Gradients = Sequence[Tensor | None]


class Lines:
    """The layout of one reduction: parameters (sharded ones, scalars, other replicated ones) whose gradients are reduced in one dtype."""

    def __init__(
        self,
        platform: Platform,
        params: Sequence[ManagedParameter],
        dtype: DType,
        num_shards: int,
        device: str,
    ) -> None:
        self.platform = platform
        self.sharded = [param for param in params if param.slot is not None]
        self.scalars = [param for param in params if param.slot is None and not param.shape]
        self.replicated = [param for param in params if param.slot is None and param.shape]
        self.params = [*self.sharded, *self.scalars, *self.replicated]
        self.slots: list[Slot] = [param.slot for param in self.sharded if param.slot is not None]
        self.dtype = dtype
        self.num_shards = num_shards
        self.device = device
        self.sizes = [*(slot.numel for slot in self.slots), len(self.scalars) + len(self.params)]
        """Elements of the parts of one line, the tail last."""
        self.numel = sum(self.sizes)
        """Of one line."""
        self._fits = [slot.is_leading and not slot.padding_numel for slot in self.slots]
        """Whether a gradient may be its own block."""
        self.narrow_dtype = self._narrow_dtype()
        """In which the gradients of one backward can travel; see [Note: narrow on the wire]. None: in :attr:`dtype` only."""
        dtypes = {param.dtype for param in self.params}
        self.dtype_of_shards = dtypes.pop() if len(dtypes) == 1 else None
        """None: they differ."""
        self._buffer_numels = [slot.numel * num_shards for slot in self.slots]
        self.replicated_sizes = [math.prod(param.shape) for param in self.replicated]
        ones = [1] * len(self.scalars)
        self._sizes_of_parts = [*self.sizes[:-1], *ones, len(self.params), *self.replicated_sizes]
        self._writes_views = platform.supports("write_into_view", device)
        self._all_used: dict[DType, Tensor] = {}
        self._are_complex = platform.dtype_name(dtype).startswith("complex")

    def take_gradients(self) -> list[Tensor | None]:
        """Of all parameters, which have none after that."""
        platform = self.platform
        found = platform.take_grads([param.full for param in self.params])
        if any(param.unsynced is not None or param.has_wide_gradient for param in self.params):
            found = [param.with_others(x) for param, x in zip(self.params, found, strict=True)]
        if self._are_complex:  # some may be marked as conjugates, and what is sent is what lies in memory
            found = [None if x is None else platform.contiguous(x) for x in found]
        return found

    def refuse_sparse(self, gradients: Gradients) -> None:
        """ValueError that names the parameter if a gradient is sparse."""
        for param, x in zip(self.params, gradients, strict=True):
            if getattr(x, "is_sparse", False):
                raise ValueError(
                    f"the gradient of parameter {param.name!r}, of shape {param.shape}, is sparse, and gradients are reduced with all of their "
                    "elements: make the embedding with sparse=False, or give the parameter as one of ignored_params"
                )

    def nbytes(self, dtype: DType) -> int:
        """Of all lines, if they travel in ``dtype``."""
        return self.numel * self.num_shards * self.platform.itemsize(dtype)

    def _narrow_dtype(self) -> DType | None:
        platform, found = self.platform, {param.compute_dtype for param in self.params}
        if self.num_shards == 1 or len(found) != 1 or not platform.supports("exchange", self.device):
            return None
        (dtype,) = found
        is_narrower = platform.itemsize(dtype) < platform.itemsize(self.dtype)
        comes_wide = any(param.has_wide_gradient for param in self.params)
        return dtype if is_narrower and not comes_wide else None

    def blocks(self, gradients: Gradients, dtype: DType) -> list[Tensor]:
        """Per parameter its chunks, rank by rank, and the tail, rank by rank: 1-D, in ``dtype``.

        Gradients that lie as they must are taken as they are; for the others there is one buffer, filled in one pass.
        """
        platform = self.platform
        if not self._writes_views:
            columns = platform.split(self.rows(gradients, dtype), self.sizes, 1)
            return [platform.reshape(platform.contiguous(part), (-1,)) for part in columns]
        given = list(gradients[: len(self.sharded)])
        is_contiguous = platform.is_contiguous
        ready = [
            fits and x is not None and x.dtype == dtype and is_contiguous(x)
            for x, fits in zip(given, self._fits, strict=True)
        ]
        rest = [numel for numel, is_ready in zip(self._buffer_numels, ready, strict=True) if not is_ready]
        blocks: list[Tensor] = []
        targets: list[Tensor] = []
        values: list[Tensor] = []
        if rest:
            # The host's time counts here: one buffer and one launch for all.
            parts = iter(platform.split(platform.empty((sum(rest),), dtype, self.device), rest))
        for x, slot, is_ready in zip(given, self.slots, ready, strict=True):
            if is_ready:
                blocks.append(platform.reshape(x, (-1,)))
                continue
            block = next(parts)
            self._plan_copy(block, x, slot, targets, values)
            blocks.append(block)
        if targets:
            platform.foreach_copy_(targets, values)
        blocks.append(platform.reshape(self._tail(gradients, dtype), (-1,)))
        return blocks

    def rows(self, gradients: Gradients, dtype: DType) -> Tensor:
        """All lines as one tensor, ``(ranks, numel)`` in ``dtype``: for backends that take one tensor, and for those without writable views."""
        platform = self.platform
        if self.num_shards == 1 and self._writes_views:
            return self._only_line(gradients, dtype)
        blocks = []
        for x, slot in zip(gradients[: len(self.sharded)], self.slots, strict=True):
            if x is None:
                blocks.append(platform.zeros((self.num_shards, slot.numel), dtype, self.device))
                continue
            x = platform.cast(x, dtype)
            if slot.is_leading:
                if slot.padding_numel:
                    flat = platform.reshape(x, (-1,))
                    x = platform.cat([flat, platform.zeros((slot.padding_numel,), dtype, self.device)])
                blocks.append(platform.reshape(x, (self.num_shards, slot.numel)))
                continue
            chunks = []
            for rank in range(self.num_shards):
                flat = platform.reshape(self._chunk(x, slot, rank), (-1,))
                padding = slot.numel - slot.local_numel(rank)
                if padding:
                    flat = platform.cat([flat, platform.zeros((padding,), dtype, self.device)])
                chunks.append(platform.reshape(flat, (1, slot.numel)))
            blocks.append(platform.cat(chunks))
        blocks.append(self._tail(gradients, dtype))
        return platform.cat(blocks, 1)

    def _only_line(self, gradients: Gradients, dtype: DType) -> Tensor:
        """Of one rank: filled in one pass."""
        platform = self.platform
        line = platform.empty((sum(self.sizes),), dtype, self.device)
        *places, tail = platform.split(line, self.sizes)
        targets, values = [platform.reshape(tail, (1, -1))], [self._tail(gradients, dtype)]
        for place, x, slot in zip(places, gradients[: len(self.sharded)], self.slots, strict=True):
            self._plan_copy(place, x, slot, targets, values)
        platform.foreach_copy_(targets, values)
        return platform.reshape(line, (1, -1))

    def replicated_line(self, gradients: Gradients) -> Tensor | None:
        """1-D, the gradients of replicated parameters that are no scalars; None if there are no such parameters."""
        if not self.replicated:
            return None
        platform, found = self.platform, gradients[len(self.sharded) + len(self.scalars) :]
        return platform.cat(
            [
                platform.zeros((numel,), self.dtype, self.device)
                if x is None
                else platform.reshape(platform.cast(x, self.dtype), (-1,))
                for x, numel in zip(found, self.replicated_sizes, strict=True)
            ]
        )

    def parts(self, row: Tensor) -> tuple[list[Tensor], Tensor]:
        """Of what has come back, a line and what stands behind it: 1-D parts in the order of :attr:`params`, and the numbers of
        those that have used them.
        """
        found = self.platform.split(row, self._sizes_of_parts)
        at = len(self.sharded) + len(self.scalars)
        return [*found[:at], *found[at + 1 :]], found[at]

    def _plan_copy(
        self, block: Tensor, x: Tensor | None, slot: Slot, targets: list[Tensor], values: list[Tensor]
    ) -> None:
        platform = self.platform
        if x is None:
            platform.fill_(block, 0.0)
        elif slot.is_leading:
            if slot.padding_numel:
                platform.fill_(platform.narrow(block, 0, slot.whole_numel, slot.padding_numel), 0.0)
                block = platform.narrow(block, 0, 0, slot.whole_numel)
            targets.append(platform.reshape(block, slot.shape))
            values.append(x)
        else:
            for rank in range(self.num_shards):
                start, numel = rank * slot.numel, slot.local_numel(rank)
                if numel < slot.numel:
                    platform.fill_(platform.narrow(block, 0, start + numel, slot.numel - numel), 0.0)
                if numel:
                    part = platform.narrow(block, 0, start, numel)
                    targets.append(platform.reshape(part, slot.local_shape(rank)))
                    values.append(self._chunk(x, slot, rank))

    def _chunk(self, x: Tensor, slot: Slot, rank: int) -> Tensor:
        length = slot.local_shape(rank)[slot.dim]
        return self.platform.narrow(x, slot.dim, slot.local_start(rank), length)

    def _tail(self, gradients: Gradients, dtype: DType) -> Tensor:
        platform = self.platform
        scalars = gradients[len(self.sharded) : len(self.sharded) + len(self.scalars)]
        used = [x is not None for x in gradients]
        if not scalars and all(used):  # the common case: the same tail every time
            if dtype not in self._all_used:
                self._all_used[dtype] = platform.full((self.num_shards, len(used)), 1.0, dtype, self.device)
            return self._all_used[dtype]
        parts = []
        for x in scalars:
            one = platform.zeros((), dtype, self.device) if x is None else platform.cast(x, dtype)
            parts.append(platform.reshape(one, (1, 1)))
        if not all(used):
            parts.append(platform.tensor([[float(flag) for flag in used]], dtype, self.device))
        else:
            parts.append(platform.full((1, len(used)), 1.0, dtype, self.device))
        line = parts[0] if len(parts) == 1 else platform.cat(parts, 1)
        return line if self.num_shards == 1 else platform.cat([line] * self.num_shards)
