"""The backends that tests run on: what each needs, whether it can run here, and which ones a run asks for.

The only file of the harness that may tell backends apart by their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hp_platform.launch import WorkerError
from hp_platform.launch._group import WorkerGroup
from hp_platform.platform import ENVIRONMENT_VARIABLE, get_platform

SELECT_VARIABLE = "HP_TEST_BACKENDS"
REQUIRE_VARIABLE = "HP_REQUIRE_BACKENDS"
SCALE_VARIABLE = "HP_TEST_TIMEOUT_SCALE"
COUNT_VARIABLE = "HP_TEST_DEVICES"
"""How many devices have been counted, such as ``npu=8``: the plugin says so to the processes that it starts. Each would start
one more process to count them again."""
SHARE_VARIABLE = "HP_TEST_RANKS_PER_DEVICE"
"""How many ranks may share a device, where a backend's communication can be told to let them. More ranks than devices test what
is right, never what is fast: they take turns on the device."""
PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Backend:
    """A framework on a kind of device."""

    name: str
    device_type: str
    communication: str
    """The communication library, for the report's header; empty on ``plain``, which has no world."""
    modules: tuple[str, ...] = ()
    """What must be installed; the first is also the name of the extra's framework."""
    extra: str = ""
    device_file: str = ""
    """A file that exists where there is such a device; looked at before a process is started to count devices."""
    emulated_by: str = ""
    """The variable whose being set means that the device is emulated, so that ``device_file`` is not needed."""
    usual_max_size: int | None = None
    """Tests of more ranks run on this many unless they insist: slow backends."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers."""
    imported_before: tuple[str, ...] = ()
    """What the process has imported that the workers are forked from; see :meth:`before_fork`."""
    sharing: Mapping[str, str] = field(default_factory=dict)
    """Variables of a worker that shares its device with others, ``{rank}`` its rank; none where they cannot."""

    def before_fork(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """What :mod:`hp_platform.testing.fork_server` imports; none: each worker is a fresh Python.

        None on a real accelerator: what has looked for its driver while it was imported is not to be forked. None but on Linux,
        which ends children with their parents.
        """
        is_real = self.device_file and not variables.get(self.emulated_by)
        return () if is_real or sys.platform != "linux" else self.imported_before


_TORCH = {ENVIRONMENT_VARIABLE: "torch", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""torch_npu is imported by whoever wants it: loaded by itself, it breaks `import torch` where there is no CANN."""

_OF_TORCH = ("numpy.random", "torch", "torch._dynamo")
"""The last one is what the first optimizer of a process imports; it takes as long as torch itself."""

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("torch", "cpu", "gloo", ("torch",), "torch", environment=_TORCH, imported_before=_OF_TORCH),
        Backend(
            "cuda",
            "cuda",
            "nccl",
            ("torch",),
            "torch",
            device_file="/dev/nvidiactl",
            environment=_TORCH,
            # NCCL refuses a device that two ranks of one host have, so each rank is a host to it, and they talk through sockets.
            sharing={
                "NCCL_HOSTID": "rank-{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            },
        ),
        Backend(
            "npu",
            "npu",
            "hccl",
            ("torch", "torch_npu"),
            "npu",
            device_file="/dev/davinci_manager",
            emulated_by="NPU_EMULATOR",
            usual_max_size=2,
            environment=_TORCH,
            imported_before=(*_OF_TORCH, "torch_npu"),
        ),
        # Waiting ranks spin: more than two of them slow a small machine down for all.
        # GLOG_v=3: errors only; MindSpore's dozens of warnings per process would bury a test's own output.
        Backend(
            "mindspore",
            "cpu",
            "mccl",
            ("mindspore",),
            "mindspore",
            usual_max_size=2,
            environment={ENVIRONMENT_VARIABLE: "mindspore", "GLOG_v": "3"},
            imported_before=("numpy.random", "mindspore"),
        ),
    )
}
"""The backends that ``backends=None`` means, and whose names the variables take."""

PLAIN = Backend("plain", "cpu", "")
"""No framework and no world, only processes: for tests of what stands below them. Always there, never selected by a variable."""


def known(name: str) -> Backend:
    """The backend called ``name``. ValueError for another name."""
    if name == PLAIN.name:
        return PLAIN
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known ones are {', '.join([*BACKENDS, PLAIN.name])}")
    return BACKENDS[name]


@dataclass(frozen=True)
class Selection:
    """The backends of one run."""

    running: tuple[str, ...]
    """Those that tests run on."""
    absent: Mapping[str, str]
    """Those that do not run, with the reason."""
    named: frozenset[str]
    """Those that ``HP_TEST_BACKENDS`` names; their absent tests are shown as skipped. Empty: the variable is not set."""
    required: frozenset[str]
    devices: Mapping[str, int]
    """How many devices the backends on accelerators have."""
    ranks_per_device: int = 1
    """See :data:`SHARE_VARIABLE`."""

    def max_size(self, backend: Backend) -> int | None:
        """How many ranks can run at most; None without bound."""
        if backend.name not in self.devices:
            return None
        return self.devices[backend.name] * self.ranks_on_each(backend)

    def ranks_on_each(self, backend: Backend) -> int:
        """How many ranks may share a device."""
        return self.ranks_per_device if backend.sharing else 1

    def header(self) -> list[str]:
        """Lines for the report's head."""
        shown = [self._describe(BACKENDS[name]) for name in self.running]
        lines = [f"backends: {', '.join(shown) or 'none'}"]
        lines.extend(f"backend {name} does not run: {reason}" for name, reason in self.absent.items())
        return lines

    def _describe(self, backend: Backend) -> str:
        if backend.name not in self.devices:
            return f"{backend.name} ({backend.device_type}, {backend.communication})"
        emulated = "emulated " if backend.emulated_by and os.environ.get(backend.emulated_by) else ""
        shared = (
            f", up to {self.ranks_per_device} ranks on each"
            if self.ranks_per_device > 1 and backend.sharing
            else ""
        )
        return f"{backend.name} ({self.devices[backend.name]} {emulated}devices{shared}, {backend.communication})"


def select(variables: Mapping[str, str]) -> Selection:
    """Read ``HP_TEST_BACKENDS`` and ``HP_REQUIRE_BACKENDS`` (names with commas) and look what can run here.

    Unset, the first means all backends that can run. ``HP_TEST_RANKS_PER_DEVICE`` is read, too. ValueError for unknown names, for
    a required backend that is not among the named ones, and for a required one that cannot run here.
    """
    named = _names(variables, SELECT_VARIABLE)
    required = _names(variables, REQUIRE_VARIABLE)
    left_out = [name for name in required if named and name not in named]
    if left_out:
        raise ValueError(
            f"{REQUIRE_VARIABLE} requires {', '.join(left_out)}, but {SELECT_VARIABLE}={variables[SELECT_VARIABLE]!r} "
            f"leaves it out: name it there too, or do not require it"
        )
    running, absent, devices = [], {}, {}
    counted = _counted(variables)
    for name in named or BACKENDS:
        backend = BACKENDS[name]
        reason = _missing(backend)
        if reason is None and name in counted:
            devices[name] = counted[name]
        elif reason is None and backend.device_file:
            devices[name], reason = _count_devices(backend)
        if reason is None:
            running.append(name)
        else:
            absent[name] = reason
            devices.pop(name, None)
    for name in required:
        if name in absent:
            raise ValueError(f"{REQUIRE_VARIABLE} requires {name}, which cannot run here: {absent[name]}")
    return Selection(
        tuple(running), absent, frozenset(named), frozenset(required), devices, ranks_per_device(variables)
    )


def told(devices: Mapping[str, int]) -> str:
    """The value of ``HP_TEST_DEVICES`` that tells other processes what :func:`select` has counted here."""
    return ",".join(f"{name}={count}" for name, count in devices.items())


def timeout_scale(variables: Mapping[str, str]) -> float:
    """The factor ``HP_TEST_TIMEOUT_SCALE`` on all time limits; 1 if it is not set. ValueError unless it is a positive number."""
    text = variables.get(SCALE_VARIABLE, "").strip() or "1"
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise ValueError(f"{SCALE_VARIABLE}={text!r}: give a positive number, such as 2 for a slow machine")
    return scale


def ranks_per_device(variables: Mapping[str, str]) -> int:
    """The number that ``HP_TEST_RANKS_PER_DEVICE`` gives; 1 if it is not set. ValueError unless it is a whole number of at least 1."""
    text = variables.get(SHARE_VARIABLE, "").strip() or "1"
    if not text.isdecimal() or not int(text):
        raise ValueError(
            f"{SHARE_VARIABLE}={text!r}: give a whole number of ranks, such as 2 for pairs on one device"
        )
    return int(text)


def prepare_worker(backend: Backend, rank: int) -> None:
    """What a backend wants once per worker process, before it joins the world."""
    if ranks_per_device(os.environ) > 1:
        for variable, value in backend.sharing.items():
            os.environ[variable] = value.format(rank=rank)
    if backend.name == "mindspore":
        blocking = importlib.import_module("hp_platform.mindspore.blocking")
        blocking.launch_blocking()  # errors of asynchronous kernels would surface in a later, innocent test
        blocking.use_one_thread()  # as OMP_NUM_THREADS=1 does for other frameworks


def _names(variables: Mapping[str, str], variable: str) -> tuple[str, ...]:
    names = tuple(
        dict.fromkeys(name.strip() for name in variables.get(variable, "").split(",") if name.strip())
    )
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise ValueError(
            f"{variable}: unknown backend {', '.join(map(repr, unknown))}; known ones are {', '.join(BACKENDS)}"
        )
    return names


def _counted(variables: Mapping[str, str]) -> dict[str, int]:
    parts = [part.partition("=") for part in variables.get(COUNT_VARIABLE, "").split(",") if part.strip()]
    if not all(
        name.strip() in BACKENDS and count.strip().isdecimal() and int(count) for name, _, count in parts
    ):
        raise ValueError(
            f"{COUNT_VARIABLE}={variables[COUNT_VARIABLE]!r}: the plugin sets it, such as npu=8; unset it to count again"
        )
    return {name.strip(): int(count) for name, _, count in parts}


def _missing(backend: Backend) -> str | None:
    for module in backend.modules:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'hp-platform[{backend.extra}]'"
    emulated = backend.emulated_by and os.environ.get(backend.emulated_by)
    if backend.device_file and not emulated and not Path(backend.device_file).exists():
        or_emulated = f", and {backend.emulated_by} is not set" if backend.emulated_by else ""
        return f"this machine has no such device ({backend.device_file} does not exist{or_emulated})"
    return None


def _count_devices(backend: Backend) -> tuple[int, str | None]:
    """Ask in a process of its own: the pytest process must not take a context on the device."""
    try:
        with WorkerGroup(1, env=backend.environment, capture=True) as group:
            try:
                (count,) = group.call(count_devices, (backend.device_type,), timeout=PROBE_SECONDS)
            finally:
                group.discard()
    except WorkerError as error:
        return 0, f"counting its devices failed: {error}"
    return count, None if count else "the framework sees no such device"


def count_devices(device_type: str) -> int:
    """How many devices of a kind this process sees; 0 if the kind is not available."""
    platform = get_platform()
    return platform.device(device_type).count() if device_type in platform.device_types() else 0
