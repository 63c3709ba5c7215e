"""Tensors in files, whoever wrote them, and any box of them: what native checkpoints and Hugging Face folders have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hp_dtensor.checkpoint.boxes import Box, overlap
from hp_dtensor.checkpoint.safetensors_file import NAME_OF, WIDTH_OF, TensorFile
from hp_platform import get_platform


class Chunk(NamedTuple):
    """Where a part of a tensor lies."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files."""

    code: str
    """The file format's name of the dtype."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass
class Stored:
    """All that a folder holds."""

    folder: Path
    tensors: dict[str, StoredTensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    """Names of tensors and values as they stood in the state."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the files, where they are known."""
    incomplete: tuple[str, ...] = ()
    _open: dict[str, TensorFile] = field(default_factory=dict)

    def file(self, name: str) -> TensorFile:
        """One of its files, opened once. ValueError if it is missing or damaged."""
        if name not in self._open:
            path = self.folder / name
            if not path.exists():
                raise ValueError(f"{self.folder} lacks {name}, which its index names: it is damaged")
            self._open[name] = TensorFile(path, self.sizes.get(name))
        return self._open[name]

    def bits(self, name: str, box: Box) -> Any:
        """A box of a tensor, as a new numpy array of unsigned integers. Only what overlaps is read.

        ValueError if the chunks do not cover it.
        """
        import numpy as np

        tensor = self.tensors[name]
        out = np.empty(box.size, f"u{WIDTH_OF[tensor.code]}")
        covered = 0
        for chunk in tensor.chunks:
            common = overlap(chunk.box, box)
            if common is None:
                continue
            entry = self.file(chunk.file).entries.get(chunk.key)
            if entry is None or (entry.code, entry.shape) != (tensor.code, chunk.box.size):
                raise ValueError(
                    f"{self.folder / chunk.file} has {entry} for {chunk.key}, expected {tensor.code} {list(chunk.box.size)}: "
                    f"the file belongs to another checkpoint, or is damaged"
                )
            source = self.file(chunk.file).bits(chunk.key)
            out[common.slices_in(box)] = source[common.slices_in(chunk.box)]
            covered = covered + common.volume
        if covered < box.volume:
            raise ValueError(
                f"{self.folder} has only {covered} of the {box.volume} elements wanted of {name}: it is damaged"
            )
        return out

    def tensor(self, name: str, bits: Any, device: str | None = None) -> Any:
        """Bits of a tensor as a tensor of the framework in use, with the dtype that it was saved with."""
        platform = get_platform()
        code = self.tensors[name].code
        try:
            dtype = platform.dtype(NAME_OF[code])
        except ValueError:
            raise NotImplementedError(
                f"{name} is stored as {NAME_OF[code]}, which {platform.platform_type.value} {platform.framework_version} does "
                f"not have: convert it under a framework that has it, and save it anew"
            ) from None
        return platform.from_bits(bits, dtype, device)
