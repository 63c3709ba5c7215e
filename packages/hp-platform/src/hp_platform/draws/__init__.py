"""Draws: random values of a part of a tensor, which depend on (seed, stream, global element index) alone.

:mod:`region` (which elements), :mod:`distribution` (which values), :mod:`elementary` (logarithm, sine and quantile in IEEE
arithmetic), :mod:`evaluate` (the one algorithm, on arrays of any library).
"""

from hp_platform.draws.distribution import Distribution
from hp_platform.draws.evaluate import Arrays, draw
from hp_platform.draws.region import Region

__all__ = ["Arrays", "Distribution", "Region", "draw"]
