"""Random numbers of MindSpore."""

from __future__ import annotations

import os
from typing import Any

import mindspore
import numpy as np

from hp_platform.draws import Distribution, Region
from hp_platform.draws.host_arrays import draw_on_host
from hp_platform.mindspore import _composed, _private
from hp_platform.mindspore._dtypes import NAME_OF, resolve
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._write import exact_number
from hp_platform.philox import LANES, block_range, words_of_blocks
from hp_platform.random_stream import default_random_stream
from hp_platform.uniform import uniform


class MindSporeRandomOps:
    """Implements :class:`hp_platform.protocols.RandomOps`.

    MindSpore has two sources of randomness: kernels seeded by the global seed and by how often each kind of operation ran
    with it, and a generator that newer operations share. The state is both.
    """

    def manual_seed(self, seed: int) -> None:
        """Seed all generators."""
        mindspore.manual_seed(seed)
        # numpy, which MindSpore seeds along, takes 32 bits.
        mindspore.set_seed(seed % 2**32)
        _private.set_seeds((seed % 2**32, {}))

    def get_rng_state(self, device: str = "cpu") -> Any:
        """State of the process' generators."""
        seed, counts = _private.get_seeds()
        if seed is None:
            # Unseeded kernels draw from the system, which has no state: from here on they follow a drawn seed.
            seed = int.from_bytes(os.urandom(4), "little")
            _private.set_seeds((seed, counts))
        return seed, counts, mindspore.get_rng_state().asnumpy().tobytes()

    def set_rng_state(self, state: Any, device: str = "cpu") -> None:
        """Put a state back."""
        seed, counts, generator = state
        _private.set_seeds((seed, counts))
        mindspore.set_rng_state(mindspore.Tensor(np.frombuffer(generator, np.uint8).copy()))

    def random_bits(
        self, seed: int, stream: int, start: int, count: int, device: str = "cpu"
    ) -> mindspore.Tensor:
        """Words of the Philox sequence."""
        made: mindspore.Tensor = self.to_device(  # type: ignore[attr-defined]
            mindspore.Tensor(_words(seed, stream, start, count)), device
        )
        return made

    def uniform(
        self,
        shape: tuple[int, ...],
        low: float,
        high: float,
        *,
        seed: int,
        dtype: Any = None,
        device: str = "cpu",
    ) -> mindspore.Tensor:
        """Uniform numbers, computed by numpy: MindSpore rounds a Python number to float32 before it meets a float64 tensor."""
        wanted = mindspore.float32 if dtype is None else resolve(dtype)
        numbers = uniform(_Numpy(), shape, low, high, seed=seed, dtype=NAME_OF[wanted])  # type: ignore[arg-type]
        made: mindspore.Tensor = self.to_device(  # type: ignore[attr-defined]
            mindspore.Tensor(numbers).astype(wanted), device
        )
        return made

    def draw(
        self, distribution: Distribution, seed: int, stream: int, region: Region, device: str = "cpu"
    ) -> mindspore.Tensor:
        """Values of a region, computed by numpy on the host."""
        wanted = resolve(distribution.result)
        if device == "meta":
            return self.empty(region.size, wanted, "meta")  # type: ignore[attr-defined]
        drawn = mindspore.Tensor(draw_on_host(distribution, seed, stream, region))
        made: mindspore.Tensor = self.to_device(  # type: ignore[attr-defined]
            drawn if drawn.dtype == wanted else drawn.astype(wanted), device
        )
        return made

    def dropout_keeping(
        self, x: mindspore.Tensor, p: float, seed: int, stream: int, region: Region
    ) -> tuple[mindspore.Tensor, None]:
        """Drawn again in backward."""
        return self.dropout(x, p, seed, stream, region), None

    def dropout_again(
        self, x: mindspore.Tensor, mask: None, p: float, seed: int, stream: int, region: Region
    ) -> mindspore.Tensor:
        """Drawn again."""
        return self.dropout(x, p, seed, stream, region)

    def dropout(
        self, x: mindspore.Tensor, p: float, seed: int, stream: int, region: Region
    ) -> mindspore.Tensor:
        """Scaled values and zeros."""
        device: str = self.device_of(x)  # type: ignore[attr-defined]
        if x.is_meta or region.numel == 0:
            return self.empty(region.size, x.dtype, device)  # type: ignore[attr-defined]
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        mask = self.draw(Distribution.event(p), seed, stream, region, device)
        with no_grad():
            # Half precision is multiplied in float32, as torch does it.
            wide = x if x.dtype == mindspore.float64 else x.astype(mindspore.float32)
            scaled = (wide * exact_number(scale, wide.dtype)).astype(x.dtype)
            zeros = self.zeros_like(scaled)  # type: ignore[attr-defined]
            result: mindspore.Tensor = _composed.where(mask, zeros, scaled)
        return result

    def is_recomputing(self) -> bool:
        """Whether the library's stream draws again."""
        return default_random_stream().is_replaying


def _words(seed: int, stream: int, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    first, last = block_range(start, count)
    # The products of the cipher fill 64 bits: see the note in hp_platform.philox.
    with np.errstate(over="ignore"):
        lanes = words_of_blocks(np.arange(first, last, dtype=np.int64), seed, stream)
    words = np.stack([np.broadcast_to(lane, (last - first,)) for lane in lanes], axis=1).reshape(-1)
    return np.ascontiguousarray(words[start - first * LANES :][:count])


class _Numpy:
    """The few primitives that :func:`hp_platform.uniform.uniform` needs, on numpy arrays. Dtypes are names."""

    def dtype(self, name: str) -> str:
        return name

    def dtype_name(self, dtype: str) -> str:
        return dtype

    def random_bits(self, seed: int, stream: int, start: int, count: int, device: str = "cpu") -> Any:
        return _words(seed, stream, start, count)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.reshape(shape)

    def split(self, x: Any, sizes: tuple[int, ...], dim: int) -> list[Any]:
        return np.split(x, np.cumsum(sizes)[:-1], dim)

    def cast(self, x: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            return _rounded_to_bfloat16(x.astype(np.float32))
        return x.astype(dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, device: str) -> Any:
        return self.cast(np.full(shape, value), dtype)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return np.where(condition, x, y)


def _rounded_to_bfloat16(x: Any) -> Any:
    """float32 with the values that bfloat16 has, to nearest, ties to even."""
    bits = x.view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) & 0xFFFF0000).astype(np.uint32).view(np.float32)
