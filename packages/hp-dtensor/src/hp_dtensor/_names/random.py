"""Functions that draw random numbers, and new tensors like another one."""

from typing import Final

DRAWING: Final[dict[str, str]] = {
    "uniform_": "uniform_",
    "normal_": "normal_",
    "exponential_": "exponential_",
    "bernoulli_": "bernoulli_",
    "random_": "random_",
    "bernoulli": "bernoulli",
    "rand_like": "rand_like",
    "randn_like": "randn_like",
    "randint_like": "randint_like",
    "dropout": "dropout",
    "feature_dropout": "feature_dropout",
    "cauchy_": "cauchy_",
    "log_normal_": "log_normal_",
    "geometric_": "geometric_",
    "poisson": "poisson",
    "normal": "normal",
    "alpha_dropout": "alpha_dropout",
    "feature_alpha_dropout": "feature_alpha_dropout",
    "rrelu": "rrelu",
}
"""What takes a place in the stream."""

FUNCTIONS: Final[dict[str, str]] = {
    **DRAWING,
    "zeros_like": "zeros_like",
    "ones_like": "ones_like",
    "empty_like": "empty_like",
    "full_like": "full_like",
}

IN_PLACE: Final[dict[str, str]] = {
    "dropout": "dropout_",
    "feature_dropout": "feature_dropout_",
    "alpha_dropout": "alpha_dropout_",
    "feature_alpha_dropout": "feature_alpha_dropout_",
    "rrelu": "rrelu_",
}

PRIMITIVES: Final[dict[str, str]] = {
    "dropout": "Dropout DropoutExt FuncDropoutExt",
    "feature_dropout": "Dropout2D Dropout2dExt Dropout3D Dropout3dExt",
    "bernoulli": "Bernoulli BernoulliExt",
    "rand_like": "RandLikeExt",
    "randn_like": "RandnLike",
    "randint_like": "RandIntLike",
    "zeros_like": "ZerosLike ZerosLikeExt",
    "ones_like": "OnesLike OnesLikeExt",
    "empty_like": "EmptyLike",
    "full_like": "FullLike",
}
