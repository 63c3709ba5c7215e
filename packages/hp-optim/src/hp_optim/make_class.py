"""From an algorithm to the class that users see, on the ground of the framework in use."""

from __future__ import annotations

import importlib
from typing import Any

from hp_optim.base import OptimizerSteps
from hp_platform.platform import get_platform


def make_optimizer_class(name: str, steps: type[OptimizerSteps]) -> Any:
    """The class ``hp_optim.<name>`` that does what ``steps`` says.

    To be called once for a name, at the top of a module from which ``hp_optim`` loads it lazily: pickles hold the class by
    that name. Imports the framework.
    """
    adapter = importlib.import_module(f"hp_optim._{get_platform().platform_type.value}")
    return type(name, (steps, adapter.Optimizer), {"__doc__": steps.__doc__, "__module__": "hp_optim"})
