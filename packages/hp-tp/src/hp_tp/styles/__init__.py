"""Styles that cut a module's parameters over one mesh dim, and run it on the pieces.

Read in this order: :mod:`cuts` (what is cut of a module), :mod:`heads` (what must divide), :mod:`placing` and :mod:`parts`
(parameters become DTensors), :mod:`door`, :mod:`entrance` and :mod:`exits` (what happens to tensors at a module's door, once per
tensor: :mod:`shared`; what is sent: :mod:`moves`, and what runs beside that in backward: :mod:`put_off`), :mod:`cutting`,
:mod:`colwise`, :mod:`rowwise` and :mod:`sequence` (the styles), :mod:`compiled`, :mod:`collectives` and :mod:`description` (what
one can do with a model that is laid out).
"""

from hp_tp.styles.colwise import ColwiseParallel as ColwiseParallel
from hp_tp.styles.cuts import ModuleCuts as ModuleCuts
from hp_tp.styles.rowwise import RowwiseParallel as RowwiseParallel
from hp_tp.styles.sequence import SequenceParallel as SequenceParallel

__all__ = ["ColwiseParallel", "ModuleCuts", "RowwiseParallel", "SequenceParallel"]
