"""Random numbers that depend on (seed, number of the operation, global index of the element), and not on the sharding.

The functions take DTensors and plain tensors alike; a DTensor gets the values that a plain tensor of its global shape would
get, whatever its placements, ranks and device, to the bit (Cauchy, log-normal, geometric and Poisson numbers on one kind of
device). So a program in one process that uses these functions, or runs the
framework's own inside of :func:`global_draws`, has the values of the sharded one. On torch the framework's own functions
(``x.normal_()``, ``torch.nn.init``, ``torch.nn.Dropout`` ...) draw like this on DTensors anyway.

A stream (:class:`RandomStream`) numbers the operations; ``generator=None`` means the one that :func:`manual_seed` seeds. All
ranks must call the same random functions in the same order. No function here communicates.
"""

from hp_dtensor.rng.composed import (
    cauchy_,
    geometric_,
    log_normal_,
    poisson,
)
from hp_dtensor.rng.dropout import (
    dropout,
)
from hp_dtensor.rng.filling import (
    bernoulli_,
    exponential_,
    kaiming_normal_,
    kaiming_uniform_,
    normal_,
    random_,
    trunc_normal_,
    uniform_,
    xavier_normal_,
    xavier_uniform_,
)
from hp_dtensor.rng.making import (
    bernoulli,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
)
from hp_dtensor.rng.stream import (
    checkpoint_contexts,
    get_state,
    global_draws,
    manual_seed,
    set_state,
)
from hp_platform import RandomStream, default_random_stream

__all__ = [
    "RandomStream",
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "checkpoint_contexts",
    "default_random_stream",
    "dropout",
    "exponential_",
    "geometric_",
    "get_state",
    "global_draws",
    "kaiming_normal_",
    "kaiming_uniform_",
    "log_normal_",
    "manual_seed",
    "normal_",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random_",
    "set_state",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
]
