"""DTensor on MindSpore: everything of this package that imports mindspore. Begin with :mod:`hp_dtensor._mindspore.tensor`."""

from hp_dtensor._mindspore.tensor import DTensor as DTensor
from hp_dtensor._mindspore.tensor import dispatch as dispatch
