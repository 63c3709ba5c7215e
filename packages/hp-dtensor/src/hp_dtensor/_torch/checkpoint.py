"""DTensors in torch.distributed.checkpoint, by the protocol that torch's own sharded tensors follow.

Its planners ask a tensor for its pieces (``__create_write_items__``, ``__create_chunk_list__``) and for the memory to read
into (``__get_tensor_shard__``); its staging of asynchronous saves copies what has no memory of its own (``data_ptr() == 0``) slot
by slot. Reading such a checkpoint unpickles its metadata and everything in it that is no tensor: only load what you trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.checkpoint.sources import Source, source_of
from hp_dtensor.placements import REPLICATE
from hp_dtensor.spec import Spec, make_spec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class CheckpointMethods:
    """What torch.distributed.checkpoint asks of a tensor. Communication: none."""

    __slots__ = ()

    _local: torch.Tensor
    _spec: Spec
    _wrap: Any

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        """This rank's piece, to be written under the name ``fqn``. ValueError for a Partial."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        source = source_of(fqn, self)
        properties = TensorProperties.create_from_tensor(source.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=torch.Size(source.shape)
                ),
            )
            for chunk in _chunks(source)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Which part of the whole this rank reads. ValueError for a Partial."""
        return _chunks(source_of("the tensor", self))

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the part of this rank's piece that begins at ``index.offset``; without it, of the piece."""
        for part in source_of(index.fqn, self).parts:
            if index.offset is None or tuple(index.offset) == part.box.offset:
                return part.local.detach()
        raise ValueError(
            f"{index.fqn}: this rank holds nothing that begins at {index.offset}, only {self._spec}"
        )

    def data_ptr(self) -> int:
        """0: a DTensor has no memory of its own; ask ``to_local()``."""
        return 0

    def new_empty(self, *size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Uninitialised memory: of this tensor's shape it lies as this one, of another shape Replicate on its mesh."""
        spec = self._spec
        shape = tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if shape != spec.shape:
            spec = make_spec(spec.mesh, (REPLICATE,) * len(spec.placements), shape)
        return self._wrap(self._local.new_empty(spec.local_shape, dtype=dtype, device=device), spec)

    def new(self, *size: int) -> Any:
        """``new_empty`` in torch's older spelling, of which only sizes are taken: optimizers of torch still use it."""
        if not all(isinstance(n, int) for n in size):
            raise ValueError(
                f"new of a DTensor takes sizes, got {size}: use new_empty, or distribute_tensor for values"
            )
        return self.new_empty(size)


def _chunks(source: Source) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    # An empty piece begins where the last one ends, and two of them would be one to torch. Of a tensor without any elements
    # one piece stands for the whole.
    boxes = [part.box for part in source.parts if part.box.volume or 0 in source.shape]
    return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in boxes]
