"""Files in the safetensors format, written as a stream and read by parts.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, little-endian; the header, JSON,
name -> dtype, shape, begin and end in the data, padded with spaces to a multiple of 8; the data, row-major, little-endian,
without gaps. The header needs shapes only, so it is written before any data is touched. Wider elements stand first, so that
every tensor begins at a multiple of its element's width.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

CODE_OF: Final[dict[str, str]] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""The platform's name of a dtype -> the format's."""
NAME_OF: Final = {code: name for name, code in CODE_OF.items()}
WIDTH_OF: Final = {
    code: 1 if code == "BOOL" or code.startswith("F8") else int(code.lstrip("BFUIC")) // 8 for code in NAME_OF
}
"""Bytes of an element."""

METADATA: Final = "__metadata__"
_LONGEST_HEADER: Final = 100_000_000  # the format's own limit


class Entry(NamedTuple):
    """A tensor in a file."""

    key: str
    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return WIDTH_OF[self.code] * math.prod(self.shape)


def code_of(dtype_name: str, name: str) -> str:
    """The format's name of a dtype. ValueError, with the tensor's name, if it has none."""
    if dtype_name not in CODE_OF:
        raise ValueError(
            f"{name} is of dtype {dtype_name}, which safetensors does not know; it knows {', '.join(CODE_OF)}: convert it, "
            f"or save its parts"
        )
    return CODE_OF[dtype_name]


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """The order in which the data stands: wider elements first, then by key."""
    return sorted(entries, key=lambda entry: (-WIDTH_OF[entry.code], entry.key))


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The head of a file with these entries in this order: the length and the JSON."""
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for entry in entries:
        end = begin + entry.nbytes
        table[entry.key] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text + b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def size_of(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes of the whole file."""
    return len(header_of(entries, metadata)) + sum(entry.nbytes for entry in entries)


def write(
    path: Path,
    entries: Sequence[Entry],
    data: Iterable[Iterable[Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file; ``data`` has per entry arrays that follow each other. On the disk when this returns."""
    with path.open("wb") as file:
        file.write(header_of(entries, metadata))
        for entry, pieces in zip(entries, data, strict=True):
            start = file.tell()
            for piece in pieces:
                if piece.size:
                    file.write(piece.reshape(-1).view("u1").data)
            written = file.tell() - start
            assert written == entry.nbytes, (entry, written)
        file.flush()
        os.fsync(file.fileno())


class TensorFile:
    """A file that is open for reading: its entries, and their bits in place (mapped, so only what is looked at is read)."""

    def __init__(self, path: Path, expected_size: int | None = None) -> None:
        """ValueError, with the path, if the file is not whole."""
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if expected_size is not None and size != expected_size:
                raise ValueError(f"{path} has {size} bytes, expected {expected_size}: it is damaged")
            self._begin, table = _read_header(path, file, size)
            # Not an empty file: it has at least its header.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, str] = table.pop(METADATA, {})
        self.entries: dict[str, Entry] = {}
        self._offsets: dict[str, int] = {}
        for entry, begin in _checked(path, table, size - self._begin):
            self.entries[entry.key], self._offsets[entry.key] = entry, begin

    def bits(self, key: str) -> Any:
        """The elements as a read-only numpy array of unsigned integers, over the file itself."""
        import numpy as np

        entry = self.entries[key]
        begin = self._begin + self._offsets[key]
        return np.ndarray(entry.shape, f"<u{WIDTH_OF[entry.code]}", self._bytes, begin)


def _read_header(path: Path, file: Any, size: int) -> tuple[int, dict[str, Any]]:
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(
            f"{path} ({size} bytes) does not begin like a safetensors file: it is damaged, or no such file"
        )
    try:
        table = json.loads(file.read(length))
    except ValueError as error:
        raise ValueError(f"the header of {path} is no JSON ({error}): the file is damaged") from error
    if not isinstance(table, dict):
        raise ValueError(
            f"the header of {path} is a {type(table).__name__}, expected names: the file is damaged"
        )
    return 8 + length, table


def _checked(path: Path, table: Mapping[str, Any], size: int) -> Iterator[tuple[Entry, int]]:
    for key, value in table.items():
        try:
            entry = Entry(key, str(value["dtype"]), tuple(value["shape"]))
            begin, end = value["data_offsets"]
            fits = begin >= 0 and end <= size and end - begin == entry.nbytes
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} describes {key} as {value}, which cannot be read ({type(error).__name__}: {error}): it is damaged, or "
                f"of a dtype other than {', '.join(NAME_OF)}"
            ) from error
        if not fits:
            raise ValueError(f"{path} ends before the data of {key} ({value}): it is damaged")
        yield entry, begin
