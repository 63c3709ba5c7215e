"""The packages of the house, the backends they are tested on, and the tags of their sessions."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BACKENDS = ("torch", "npu", "mindspore")
FIRST_BACKEND = BACKENDS[0]
"""The one whose sessions also run the tests marked `once`."""

# In the order of the arrows: a package stands after all that it depends on (pip needs it so, see environments.py).
# A package without code has one test, which needs no framework; it runs once, in the environment of torch.
TESTED_BACKENDS = {
    "hp-platform": BACKENDS,
    "hp-dtensor": BACKENDS,
    "hp-fsdp": BACKENDS,
    "hp-tp": BACKENDS,
    "hp-moe": ("torch",),
    "hp-pipeline": ("torch",),
    "hp-optim": BACKENDS,
    "hp-recompute": BACKENDS,
    "hyper-parallel": BACKENDS,
}

PACKAGES = tuple(TESTED_BACKENDS)

SPREAD = ("-n", "2", "--dist", "worksteal")
"""How tests are dealt to two pytest processes: tests of several processes mostly wait for processes to start and for each
other. Each begins with one half of the tests in their order, so files stay together, and takes of the other's when its own
are done: by file alone, one would be idle while the other ends its longest file."""

# The tools that are tested in the environment of the tools; the emulated NPU is tested in that of npu.
TESTED_TOOLS = (
    "tools/bench/tests",
    "tools/lint/tests",
    "tools/nox_support/tests",
    "tools/op_table/tests",
    "tools/training_curves/tests",
)


def module_name(package: str) -> str:
    """The name a distribution is imported by: `hp-fsdp` is `hp_fsdp`."""
    return package.replace("-", "_")


def tags(backend: str, package: str | None = None) -> list[str]:
    """The tags of a test session; `quick` marks what one runs before a commit."""
    names = [backend] if package is None else [package, backend]
    return [*names, "quick"] if backend == "torch" and package is not None else names
