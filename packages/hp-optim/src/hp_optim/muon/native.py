"""``Muon``: the class for the framework in use. Importing this module chooses the framework and imports it."""

from typing import TYPE_CHECKING

from hp_optim.make_class import make_optimizer_class
from hp_optim.muon.optimizer import MuonSteps

if TYPE_CHECKING:
    Muon = MuonSteps
else:
    Muon = make_optimizer_class("Muon", MuonSteps)
