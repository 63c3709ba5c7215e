"""Random operators: a CPU generator derived from the state of the NPU generator."""

import torch

_GOLDEN_RATIO = 0x9E3779B1  # spreads neighbouring seeds
_LARGEST_SEED = 0x7FFFFFFFFFFFFFFF
_OFFSET_PER_CALL = 4  # NPU generators advance in steps of four


def cpu_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A CPU generator for one call.

    Seeded from the (seed, offset) of the NPU generator, whose offset then advances: `manual_seed`, `get_rng_state`
    and `set_rng_state` act as on hardware. The numbers are not those of the CPU nor of hardware.
    """
    if generator is not None and generator.device.type != "npu":
        return generator
    if generator is None:
        generator = torch.npu.default_generators[device.index]
    state = generator.get_state()
    words = state.view(torch.int64)  # ends with the seed and the offset
    seed, offset = int(words[-2]), int(words[-1])
    words[-1] = offset + _OFFSET_PER_CALL
    generator.set_state(state)
    derived = torch.Generator()
    derived.manual_seed((seed * _GOLDEN_RATIO + offset) & _LARGEST_SEED)
    return derived
