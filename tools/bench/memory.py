"""The peak memory of a measurement on the host, as the kernel counts it."""

from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def reset_host_peak() -> bool:
    """Start a new peak at what the process holds now; False where the kernel does not offer that."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def host_peak_bytes() -> int | None:
    """The most resident memory since the last reset; None where the kernel does not tell."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    peaks = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return next(peaks, None)
