"""``AdamW``: the class for the framework in use. Importing this module chooses the framework and imports it."""

from typing import TYPE_CHECKING

from hp_optim.adamw.optimizer import AdamWSteps
from hp_optim.make_class import make_optimizer_class

if TYPE_CHECKING:
    AdamW = AdamWSteps
else:
    AdamW = make_optimizer_class("AdamW", AdamWSteps)
