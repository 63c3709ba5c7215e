"""How the elements of a dtype look as unsigned integers: what ``to_bits`` gives on every framework."""

from __future__ import annotations


def unsigned(dtype_name: str, itemsize: int) -> str:
    """numpy's name of the unsigned integers of ``itemsize`` bytes, such as ``"u2"``. ValueError if there are none."""
    if itemsize > 8:
        raise ValueError(
            f"to_bits takes dtypes of at most 8 bytes, got {dtype_name} of {itemsize}: no unsigned integer is as wide; take the "
            f"real and the imaginary part apart"
        )
    return f"u{itemsize}"
