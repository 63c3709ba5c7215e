"""What the machine has, asked without a framework: cases are defined before one is imported."""

import shutil
import subprocess
from functools import cache


@cache
def num_gpus() -> int:
    """GPUs of this machine that its driver lists; 0 without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())
