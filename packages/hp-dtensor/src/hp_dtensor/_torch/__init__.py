"""DTensor on PyTorch: everything of this package that imports torch. Begin with :mod:`hp_dtensor._torch.tensor`."""

from hp_dtensor._torch.tensor import DTensor as DTensor
from hp_dtensor._torch.tensor import dispatch as dispatch
