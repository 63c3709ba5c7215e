"""``DTensor``: the class of the framework in use, and ``dispatch``, which runs operations on it.

Importing this module chooses the framework and imports it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hp_dtensor.dtensor import DTensorMethods
from hp_platform import get_platform

_adapter: Any = importlib.import_module(f"hp_dtensor._{get_platform().platform_type.value}")
dispatch = _adapter.dispatch
"""See :func:`hp_dtensor.dispatch.build_dispatch`."""

if TYPE_CHECKING:
    DTensor = DTensorMethods
else:
    DTensor = _adapter.DTensor
