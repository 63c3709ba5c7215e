"""Whether a job can fit at all: the least memory that its sizes need, against what there is.

A lower bound, so that nothing is refused that might have worked: parameters, gradients and the optimizer's state; the activations
that backward needs of logits and blocks; the index arrays of a batch. Frameworks need more on top.
"""

from __future__ import annotations

from hyper_parallel.trainer.data import VALIDATION_SEQUENCES
from hyper_parallel.trainer.errors import UsageError
from hyper_parallel.trainer.options import VOCABULARY, ModelSize, Options

GIB = 2**30


def num_parameters(size: ModelSize) -> int:
    """Of :class:`hyper_parallel.trainer.model.Decoder`: ``2 V D + L (4 D^2 + 3 D H + 2 D) + D``."""
    block = 4 * size.dim**2 + 3 * size.dim * size.hidden + 2 * size.dim
    return 2 * VOCABULARY * size.dim + size.layers * block + size.dim


def least_bytes(options: Options) -> int:
    """Bytes that one process of ``options`` needs at the least."""
    size, nproc = options.size, options.nproc
    wide = 8 if options.dtype == "float64" else 4
    narrow = 2 if options.dtype in ("bfloat16", "float16") else wide
    # Every process makes the whole model before it keeps its part; parameter, gradient and two averages (Muon: one) follow.
    copies = 4 if options.optimizer == "adamw" else 3
    state = wide * max(num_parameters(size), copies * num_parameters(size) // nproc)
    blocks = size.layers * (4 * size.dim + 2 * size.hidden)
    trained = options.batch // nproc * size.length * narrow * (VOCABULARY + blocks)
    validated = VALIDATION_SEQUENCES // nproc * size.length * narrow * VOCABULARY
    indices = 8 * options.batch * (size.length + 1)  # int64, the whole batch in every process
    return state + max(trained, validated) + indices


def check_fits(options: Options, memory: int, *, processes: int = 1) -> None:
    """Raise :class:`UsageError` for sizes that ``processes`` cannot have in ``memory`` bytes.

    On cpu these are all processes of this machine and its memory, else one process and its device's.
    """
    least = least_bytes(options) * processes
    if least > memory:
        where = "this machine" if options.device == "cpu" else f"a {options.device} device"
        raise UsageError(
            f"these sizes need at least {least // GIB + 1:,} GiB, {where} has {memory // GIB:,}: "
            f"{num_parameters(options.size):,} parameters, {options.batch:,} sequences of {options.size.length:,} bytes per step; "
            "give smaller ones (--dim, --hidden, --layers, --batch, --length)"
        )
