"""Starting processes, and learning what a launcher has said.

:func:`spawn` runs a function on new processes and returns its results; :func:`environment` reads the variables that
``torchrun`` and ``msrun`` set. Neither imports a framework.
"""

from hp_platform.launch._environment import LaunchEnvironment, environment
from hp_platform.launch._errors import WorkerError, WorkerTimeoutError
from hp_platform.launch._spawn import spawn

__all__ = ["LaunchEnvironment", "WorkerError", "WorkerTimeoutError", "environment", "spawn"]
