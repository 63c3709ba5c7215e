"""The compiled libraries of the emulated CANN: where they lie, whether they are current, how they are loaded."""

import ctypes
import hashlib
import importlib.metadata
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"

# The libraries with code, each from the folder of `cpp/` that is named here.
COMPILED = {"libascendcl.so": "acl", "libhccl.so": "hccl"}

# Libraries that torch_npu asks for by name, each with the library in which their symbols are found.
PLACEHOLDERS = {
    "libhcomm.so": "libhccl.so",
    "libacl_op_compiler.so": "libascendcl.so",
    "libge_runner.so": "libascendcl.so",
    "libgraph.so": "libascendcl.so",
    "libacl_tdt_channel.so": "libascendcl.so",
}

_STAMP = "stamp.json"


@dataclass(frozen=True)
class Stamp:
    """What the libraries were compiled from."""

    sources: str
    torch_npu: str
    compiler: str


def folder() -> Path:
    """`$NPU_EMULATOR_BUILD`, else `npu_emulator_lib` in the environment that runs."""
    chosen = os.environ.get("NPU_EMULATOR_BUILD")
    return Path(chosen) if chosen else Path(sys.prefix) / "npu_emulator_lib"


def source_files(part: str = "") -> list[Path]:
    return sorted(path for path in (SOURCES / part).rglob("*") if path.suffix in (".cpp", ".h", ".map"))


def sources_digest() -> str:
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def torch_npu_version() -> str | None:
    """Read from the package's metadata: torch_npu cannot be imported before the libraries exist."""
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_stamp() -> Stamp | None:
    try:
        return Stamp(**json.loads((folder() / _STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(stamp: Stamp) -> None:
    (folder() / _STAMP).write_text(json.dumps(asdict(stamp), indent=1) + "\n")


def load() -> None:
    """Load the libraries for everybody, before torch_npu asks for them by name.

    Loaded by path and with their symbols global, they are found without LD_LIBRARY_PATH: the loader takes a library
    that the process already has under that name.

    Raises:
        ImportError: the libraries are missing, or were compiled from other sources or for another torch_npu.
    """
    stamp = read_stamp()
    if stamp is None:
        raise ImportError(f"the emulated CANN is not built in {folder()}; run `python -m npu_emulator.build`")
    if (stamp.sources, stamp.torch_npu) != (sources_digest(), torch_npu_version()):
        raise ImportError(
            f"the emulated CANN in {folder()} is out of date; run `python -m npu_emulator.build`"
        )
    for name in (*COMPILED, *PLACEHOLDERS):
        ctypes.CDLL(str(folder() / name), mode=ctypes.RTLD_GLOBAL)
