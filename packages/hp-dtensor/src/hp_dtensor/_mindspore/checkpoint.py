"""What torch.distributed.checkpoint asks of a tensor is refused on MindSpore, by name."""

from __future__ import annotations

from typing import Any

from hp_platform import get_platform, require


class CheckpointMethods:
    """The same names as on PyTorch; each raises NotImplementedError with the way out."""

    __slots__ = ()

    def __create_write_items__(self, fqn: str, tensor: Any) -> Any:
        """Refused."""
        _refuse()

    def __create_chunk_list__(self) -> Any:
        """Refused."""
        _refuse()

    def __get_tensor_shard__(self, index: Any) -> Any:
        """Refused."""
        _refuse()


def _refuse() -> None:
    require(get_platform(), "torch_checkpoint", what="torch.distributed.checkpoint of a DTensor")
