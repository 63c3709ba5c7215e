"""Random numbers: the framework's generators, and the bits of a counter-based generator that are equal everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hp_platform.protocols.tensor import Tensor

if TYPE_CHECKING:
    from hp_platform.draws import Distribution, Region


class RandomOps(Protocol):
    """Primitives of randomness."""

    def manual_seed(self, seed: int) -> None:
        """Seed the framework's own generators of this process (all its devices)."""
        ...

    def get_rng_state(self, device: str = "cpu") -> Any:
        """The state of the framework's generator of ``device``; opaque."""
        ...

    def set_rng_state(self, state: Any, device: str = "cpu") -> None:
        """Put back what :meth:`get_rng_state` gave."""
        ...

    def random_bits(self, seed: int, stream: int, start: int, count: int, device: str = "cpu") -> Tensor:
        """Words ``start ... start + count - 1`` of the Philox-4x32-10 sequence (key ``seed``, counter high half ``stream``).

        int64 ``(count,)`` with values in ``[0, 2**32)``; the same on every framework and device. Word ``i`` depends on
        ``(seed, stream, i)`` alone, so any rank can draw any part of a global tensor. Source: Salmon et al., SC 2011.
        """
        ...

    def uniform(
        self,
        shape: tuple[int, ...],
        low: float,
        high: float,
        *,
        seed: int,
        dtype: Any = None,
        device: str = "cpu",
    ) -> Tensor:
        """Uniform numbers in ``[low, high)`` from :meth:`random_bits` with stream 0: the same on every framework, to rounding of ``dtype``."""
        ...

    def draw(
        self, distribution: Distribution, seed: int, stream: int, region: Region, device: str = "cpu"
    ) -> Tensor:
        """The values of the elements of ``region``: a new tensor of ``region.size`` in the distribution's dtype.

        Element by element they are those of a draw of the whole tensor, and equal to the bit on every device and framework
        (see :mod:`hp_platform.draws.distribution`). No more memory than the result and a constant. On ``"meta"``: no values.
        """
        ...

    def dropout(self, x: Tensor, p: float, seed: int, stream: int, region: Region) -> Tensor:
        """``x / (1 - p)`` with zeros where ``Distribution.event(p)`` holds; ``x`` has the shape ``region.size``. Not recorded.

        The same mask comes for the same (seed, stream, region).
        """
        ...

    def dropout_keeping(
        self, x: Tensor, p: float, seed: int, stream: int, region: Region
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`dropout`, and the mask, a byte for four elements, where reading it is quicker than drawing it again; else None."""
        ...

    def dropout_again(
        self, x: Tensor, mask: Tensor | None, p: float, seed: int, stream: int, region: Region
    ) -> Tensor:
        """:meth:`dropout` of a tensor of the same dtype with the mask that :meth:`dropout_keeping` gave for these: its backward."""
        ...

    def is_recomputing(self) -> bool:
        """Whether a forward runs for the second time now, as far as that can be seen.

        Inside of :func:`hp_recompute.checkpoint`, which sets the default stream back; torch: also inside of ``torch.utils.checkpoint``
        with ``use_reentrant=False``.
        """
        ...
