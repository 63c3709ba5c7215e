"""``DTensor``: the class of the framework in use. Importing this module chooses the framework and imports it."""

from typing import TYPE_CHECKING

from hp_dtensor.dtensor import DTensorMethods, dtensor_class

if TYPE_CHECKING:
    DTensor = DTensorMethods
else:
    DTensor = dtensor_class()
