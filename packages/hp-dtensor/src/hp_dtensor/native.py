"""``DTensor``: the class of the framework in use. Importing this module chooses the framework and imports it."""

import importlib
from typing import TYPE_CHECKING

from hp_dtensor.dtensor import DTensorMethods
from hp_platform import get_platform

if TYPE_CHECKING:
    DTensor = DTensorMethods
else:
    DTensor = importlib.import_module(f"hp_dtensor._{get_platform().platform_type.value}").DTensor
