"""What a framework must offer: nine small Protocols of primitives, one file each.

Read them in this order: :mod:`tensor`, :mod:`storage`, :mod:`nn`, :mod:`scores`, :mod:`autograd`, :mod:`random`, :mod:`updates` and :mod:`comm` are
mixed into the one object that :func:`hp_platform.get_platform` returns; :mod:`device` describes the handle that ``platform.device(name)``
returns. A primitive does one thing that both frameworks have; algorithms (mean by sum and division, recording, adjoints,
time-outs) stand once, above, in :mod:`hp_platform.collectives` and its neighbours.
"""

from hp_platform.protocols.autograd import AutogradOps
from hp_platform.protocols.comm import CommOps, NativeWork
from hp_platform.protocols.device import DeviceHandle, Event, Repeated, Stream
from hp_platform.protocols.nn import HookHandle, NNOps
from hp_platform.protocols.random import RandomOps
from hp_platform.protocols.scores import ScoreKernels, ScoreOps
from hp_platform.protocols.storage import StorageOps
from hp_platform.protocols.tensor import TensorOps
from hp_platform.protocols.updates import UpdateOps

__all__ = [
    "AutogradOps",
    "CommOps",
    "DeviceHandle",
    "Event",
    "HookHandle",
    "NNOps",
    "NativeWork",
    "RandomOps",
    "Repeated",
    "ScoreKernels",
    "ScoreOps",
    "StorageOps",
    "Stream",
    "TensorOps",
    "UpdateOps",
]
