"""Prepares `import torch_npu` when the environment says NPU_EMULATOR=1.

Called from `npu_emulator.pth` while Python starts, so this module imports little and must not raise: Python only
prints what a .pth line raises. All that can go wrong is reported by the `import torch_npu` that follows.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from npu_emulator import _beside_cuda, _libraries

_DEFAULTS = {
    # Otherwise `import torch` imports torch_npu itself, before the program says so.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # No second launch thread: the CPU kernels run on the thread that calls them.
    "TASK_QUEUE_ENABLE": "0",
}
_CANN_FOLDER = Path("/usr/local/Ascend")

_active = False


def is_active() -> bool:
    """Whether torch_npu was imported over the emulated CANN in this process."""
    return _active


def activate() -> None:
    """Make the next `import torch_npu` load the emulated CANN first and the CPU kernels afterwards."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _beside_cuda.hide_devices()
    sys.meta_path.insert(0, _TorchNpuFinder())


def real_cann() -> str | None:
    """Where a real CANN was found, or None. The emulation never stands in front of hardware."""
    if _CANN_FOLDER.exists():
        return str(_CANN_FOLDER)
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return None
    return "libascendcl.so on the library path"


class _TorchNpuFinder:
    """Finds `torch_npu` as Python would, and wraps the execution of the module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: object) -> None:
            _before_torch_npu()
            with _in_a_small_folder():
                execute(module)  # type: ignore[arg-type]
            _after_torch_npu()

        # On the instance: the loader keeps its type and all its other methods.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _in_a_small_folder() -> Iterator[None]:
    """Without ASCEND_HOME_PATH torch_npu looks for files of CANN in all folders below the current one: seconds in a repository."""
    before = os.getcwd()
    os.chdir(Path(__file__).parent)
    try:
        yield
    finally:
        os.chdir(before)


def _before_torch_npu() -> None:
    global _active
    switch = os.environ.get("NPU_EMULATOR")
    if switch != "1":
        raise ImportError(f"NPU_EMULATOR={switch!r} is not understood; expected 1, or 0 or nothing for off")
    found = real_cann()
    if found:
        raise ImportError(f"NPU_EMULATOR=1, but a real CANN is here ({found}); unset NPU_EMULATOR to use it")
    _libraries.load()
    import torch.version  # torch_npu imports torch next; not earlier, for the lines above to come at once

    if torch.version.hip:
        # Not tried: torch_npu may end the process without a word.
        raise ImportError(
            f"torch {torch.version.__version__} is built for another accelerator; install torch+cpu"
        )
    if torch.version.cuda:
        _beside_cuda.release_keys(Path(torch.__file__).parent)
    _active = True


def _after_torch_npu() -> None:
    from npu_emulator import kernels

    kernels.install()
