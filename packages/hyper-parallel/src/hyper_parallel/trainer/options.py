"""What can be asked of the trainer, checked before any process starts."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from hyper_parallel.trainer.errors import UsageError
from hyper_parallel.trainer.results import DEFAULT, default_folder

VOCABULARY = 256
"""Bytes."""
LARGEST = 2**31 - 1
DTYPES = ("float32", "float64", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class ModelSize:
    """The decoder's dimensions. The defaults make about half a million parameters."""

    dim: int = 96
    layers: int = 4
    heads: int = 4
    hidden: int = 256
    """Width inside of the feed-forward block."""
    length: int = 128
    """Bytes per training sequence, and the longest context."""


@dataclass(frozen=True)
class Options:
    """One training job."""

    size: ModelSize
    nproc: int
    device: str
    """Kind of device: cpu, cuda or npu."""
    data: str | None
    """File or folder of text; None: the documentation that ships inside CPython."""
    out: str
    steps: int
    batch: int
    """Sequences per step over all processes together, so that the numbers do not depend on their number."""
    lr: float
    optimizer: str
    """``"adamw"``, or ``"muon"`` for the matrices of the blocks beside it."""
    seed: int
    dtype: str
    save_every: int
    resume: bool

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        return {"size": asdict(self.size), "dtype": self.dtype, "optimizer": self.optimizer}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser(prog: str) -> argparse.ArgumentParser:
    """The command line of ``hyper-parallel train``. Unknown options raise :class:`UsageError`."""
    size = ModelSize()
    p = _Parser(
        prog=prog,
        description="Train a byte-level language model, its parameters sharded over processes.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--platform", choices=["torch", "mindspore"], help="framework (default: the one that is installed)"
    )
    p.add_argument("--device", choices=["cpu", "cuda", "npu"], help="default: the best available")
    p.add_argument(
        "--nproc", type=int, help="processes (default: the accelerators of this machine, on cpu 4)"
    )
    p.add_argument(
        "--data", metavar="FILE_OR_FOLDER", help="text to learn (default: CPython's own documentation)"
    )
    p.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"for results (default: {DEFAULT}, or {DEFAULT}-2 and so on where that holds a run)",
    )
    p.add_argument("--steps", type=int, default=450, help="optimizer steps (default: %(default)s)")
    p.add_argument(
        "--batch",
        type=int,
        default=32,
        help="sequences per step, all processes together (default: %(default)s)",
    )
    p.add_argument(
        "--length", type=int, default=size.length, help="bytes per sequence (default: %(default)s)"
    )
    p.add_argument("--dim", type=int, default=size.dim, help="model width (default: %(default)s)")
    p.add_argument("--layers", type=int, default=size.layers, help="decoder blocks (default: %(default)s)")
    p.add_argument("--heads", type=int, default=size.heads, help="attention heads (default: %(default)s)")
    p.add_argument(
        "--hidden", type=int, default=size.hidden, help="feed-forward width (default: %(default)s)"
    )
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    p.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="muon: for the matrices of the blocks, adamw for the rest (default: %(default)s)",
    )
    p.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of initial values and of the order of the data (default: %(default)s)",
    )
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of parameters and compute; the 16-bit ones compute and gather in 16 bits over float32 parameters (default: %(default)s)",
    )
    p.add_argument(
        "--save-every",
        type=int,
        default=150,
        metavar="STEPS",
        help="checkpoint interval (default: %(default)s)",
    )
    p.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out (default: of the last run in a folder that was not given)",
    )
    p.add_argument(
        "--overwrite",
        action="store_true",
        help="remove what another run has left in --out, and train anew there",
    )
    p.add_argument(
        "--verify", action="store_true", help="afterwards run the same job in one process and compare"
    )
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def options_of(arguments: argparse.Namespace, *, device: str, nproc: int) -> Options:
    """Checked options. Raises :class:`UsageError`, naming the option and what would work."""
    size = ModelSize(arguments.dim, arguments.layers, arguments.heads, arguments.hidden, arguments.length)
    for name in ("nproc", "steps", "batch", "length", "dim", "layers", "heads", "hidden", "save_every"):
        value = nproc if name == "nproc" else getattr(arguments, name)
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if value > LARGEST:
            raise UsageError(f"--{name.replace('_', '-')} must be at most {LARGEST}, got more")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {arguments.seed}")
    if not 0 < arguments.lr < 1:
        raise UsageError(f"--lr must lie between 0 and 1, got {arguments.lr}")
    for name in ("data", "out"):
        if getattr(arguments, name) == "":
            raise UsageError(f"--{name} is empty: give a path, or leave it out")
    if arguments.batch % nproc:
        raise UsageError(
            f"--batch {arguments.batch} does not divide over {nproc} processes: give a multiple of {nproc}, or another --nproc"
        )
    if size.dim % (2 * size.heads):
        fitting = 2 * size.heads * max(1, size.dim // (2 * size.heads))
        raise UsageError(
            f"--dim {size.dim} must be a multiple of twice --heads {size.heads} (rotary attention turns pairs): try --dim {fitting}"
        )
    return Options(
        size=size,
        nproc=nproc,
        device=device,
        data=arguments.data,
        out=arguments.out or default_folder(resume=arguments.resume, overwrite=arguments.overwrite),
        steps=arguments.steps,
        batch=arguments.batch,
        lr=arguments.lr,
        optimizer=arguments.optimizer,
        seed=arguments.seed,
        dtype=arguments.dtype,
        save_every=arguments.save_every,
        resume=arguments.resume,
    )
