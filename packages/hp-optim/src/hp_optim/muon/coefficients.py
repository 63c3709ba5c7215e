"""The polynomials of Newton-Schulz iterations: sets of coefficients, and which of them which step takes.

Step ``i`` replaces every singular value ``s`` by ``a s + b s^3 + c s^5`` with its triple ``(a, b, c)``, starting from a matrix
whose singular values lie in ``[0, 1]`` because it has been divided by its Frobenius norm. After the steps they lie about 1.

**Any number of steps.** Fewer steps than a set has triples take the first ones; of more steps, those beyond the end repeat the
last triple. What that means differs between the sets, so each says it below. The table gives the smallest and the largest
singular value after so many steps, where those of the normalised matrix were in ``[0.01, 1]`` (smaller ones are multiplied by
the product of the ``a``, about 490 in five steps of the first two sets, and come out below the interval if that does not do):

========  ================  ================  ================
steps     asym5             quintic           polar-express
========  ================  ================  ================
3         0.382 ... 1.248   0.400 ... 1.203   0.186 ... 1.866
4         0.917 ... 1.147   0.681 ... 1.203   0.439 ... 1.561
5         0.977 ... 1.032   0.681 ... 1.135   0.870 ... 1.124
6         0.978 ... 0.994   0.681 ... 1.135   0.997 ... 1.002
8         0.987 ... 0.990   0.681 ... 1.135   1 to 1e-6
20        0.989 to 1e-4     0.681 ... 1.135   1 to rounding
========  ================  ================  ================

Needs no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias, cast

Triple: TypeAlias = tuple[float, float, float]
DEFAULT_SET: Final = "asym5"
DEFAULT_STEPS: Final = 5


@dataclass(frozen=True)
class Coefficients:
    """A sequence of triples, and by how much more than the Frobenius norm a matrix is divided before the first one."""

    name: str
    triples: tuple[Triple, ...]
    margin: float = 1.0

    def of_steps(self, num_steps: int) -> tuple[Triple, ...]:
        """The triple of each step: the first ones, and the last one again beyond the end. ValueError unless ``num_steps >= 1``."""
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(
                f"ns_steps is {num_steps!r}; a whole number of at least 1 is expected: none would leave the matrix as it is"
            )
        repeated = max(0, num_steps - len(self.triples))
        return self.triples[:num_steps] + self.triples[-1:] * repeated


ASYM5: Final = Coefficients(
    "asym5",
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
)
"""Five triples found by numerical search for five steps together (Jiacheng You, x.com/YouJiacheng/status/1905861218138804534).

Made for five steps. Fewer take the first triples, which were not found for that: of three, 0.38 is left. More repeat the last
one, which draws all values to its fixed point 0.989, closer together with each step.
"""

QUINTIC: Final = Coefficients("quintic", ((3.4445, -4.7750, 2.0315),))
"""One triple for all steps, with the steepest slope at 0 that keeps values about 1 (Keller Jordan, "Muon: An optimizer for hidden
layers in neural networks", 2024, kellerjordan.github.io/posts/muon; the default of torch.optim.Muon).

Any number of steps is as it was meant; values wander in 0.68 ... 1.13 and do not converge.
"""

_POLAR_EXPRESS: Final = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)


def _with_safety(triple: Triple, factor: float) -> Triple:
    """``p(x / factor)``: for a matrix that rounding has made larger by up to ``factor``."""
    a, b, c = triple
    return a / factor, b / factor**3, c / factor**5


POLAR_EXPRESS: Final = Coefficients(
    "polar-express",
    (*(_with_safety(triple, 1.01) for triple in _POLAR_EXPRESS), (1.875, -1.25, 0.375)),
    margin=1.01,
)
"""Each triple is the best (minimax) one for the interval that the ones before it leave, from ``[0.001, 1]`` on (Amsel, Persson,
Musco, Gower, "The Polar Express", arXiv 2505.16932, Algorithm 1, with its safety factor of 1.01 for bfloat16).

Made for any number of steps: each is the best continuation of those before it, and beyond the eighth the last one, that of the
classical iteration, repeats, and converges to 1. Of few steps the interval is wide (the table), in return for small values.
"""

COEFFICIENT_SETS: Final[Mapping[str, Coefficients]] = MappingProxyType(
    {each.name: each for each in (ASYM5, QUINTIC, POLAR_EXPRESS)}
)
"""The sets by the names that ``ns_coefficients`` takes."""


def coefficients_of(given: str | Coefficients | Sequence[Sequence[float]] | Sequence[float]) -> Coefficients:
    """The set that is meant by a name of :data:`COEFFICIENT_SETS`, a sequence of triples, or one triple for all steps.

    Of a sequence, fewer steps take the first triples and more repeat the last one. ValueError for an unknown name, and for
    anything but triples of finite numbers.
    """
    if isinstance(given, Coefficients):
        return given
    if isinstance(given, str):
        if given not in COEFFICIENT_SETS:
            raise ValueError(
                f"ns_coefficients is {given!r}; expected {', '.join(map(repr, COEFFICIENT_SETS))}, or a sequence of triples "
                "(a, b, c)"
            )
        return COEFFICIENT_SETS[given]
    try:
        entries = tuple(given)
        triples = (entries,) if entries and all(_is_number(each) for each in entries) else entries
        found = tuple(tuple(cast("Sequence[float]", triple)) for triple in triples)
    except TypeError:
        raise ValueError(_expected(given)) from None
    if not found or any(len(triple) != 3 or not all(map(_is_number, triple)) for triple in found):
        raise ValueError(_expected(given))
    return Coefficients("given", tuple((float(a), float(b), float(c)) for a, b, c in found))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _expected(given: object) -> str:
    return (
        f"ns_coefficients is {given!r}; expected triples of finite numbers, such as [(3.4445, -4.775, 2.0315)], one for each "
        f"step, or a name: {', '.join(map(repr, COEFFICIENT_SETS))}"
    )
