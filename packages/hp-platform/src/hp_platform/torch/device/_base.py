"""What the torch backend asks of each of its devices, beyond the public handle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hp_platform.protocols import DeviceHandle


@dataclass(frozen=True)
class CommFacts:
    """What the communication backend of a device can do."""

    reduce_ops: frozenset[str]
    """Reduce operations that are right for floating dtypes without our help."""
    reducible: frozenset[torch.dtype]
    """Dtypes that can be reduced."""
    movable: frozenset[torch.dtype]
    """Dtypes that can be sent as they are; all others travel as their bytes."""
    coalesces: bool
    """Whether several collectives go in one launch."""
    uneven_lists: bool
    """Whether the list forms of all_gather and reduce_scatter accept tensors of different sizes; else they are padded."""
    widened: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """Dtypes that are reduced in a wider one and cast back: integers wrap around to the same result."""
    exchanges_lists: bool = False
    """Whether several all_to_all of lists go in one launch."""
    gathers: bool = True
    """Whether there is a gather to one rank; else it is made of sends."""
    scatters_by_exchange: bool = False
    """Whether reduce_scatter is an all_to_all and a local reduction, because the backend's own one is worse."""
    loses_nan: bool = True
    """Whether max and min over ranks may give a number where a rank has NaN, so that floats are compared as integers."""


class TorchDevice(DeviceHandle, Protocol):
    """A device handle of the torch backend."""

    @property
    def missing(self) -> frozenset[str]:
        """Capabilities that tensors of this device lack."""
        ...

    comm: CommFacts
    world_backend: str
    """The backend string of a default group made for this device."""
    rounds_like_ieee: bool
    """Whether float64 arithmetic gives the bits that the host gives; else random numbers are computed on the host."""

    def why_not(self) -> str:
        """Why the device is not available, for a message."""
        ...

    def get_rng_state(self, device: str) -> Any:
        """State of the generator of ``device``, such as ``"cuda:1"``."""
        ...

    def set_rng_state(self, state: Any, device: str) -> None:
        """Put a state back."""
        ...

    peer_nbytes: int
    """Bytes of this process' parts of peer memory, which the allocator does not count."""

    def peer_domain(self) -> str | None:
        """See :meth:`hp_platform.protocols.CommOps.peer_domain`."""
        ...

    def copy_batches(self) -> Any:
        """Whose one call makes many copies (:class:`hp_platform.torch.device._copy_batches.CopyBatches`); None: nobody's."""
        ...

    def fused_rows(self) -> Any:
        """Whose kernels pass over rows (:class:`hp_platform.torch._triton_rows.TritonRows`); None: torch's."""
        ...

    def fused_updates(self) -> Any:
        """Whose kernels make updates in one pass (:class:`hp_platform.torch._triton_updates.TritonUpdates`); None: torch's."""
        ...

    def fused_scores(self) -> Any:
        """Whose kernels make losses of scores (:class:`hp_platform.torch._triton_scores.TritonScores`); None: they are composed."""
        ...

    def fused_draws(self) -> Any:
        """Whose kernels draw on this device (:class:`hp_platform.torch._triton_launches.TritonDraws`); None: draws are composed."""
        ...
