"""How state dicts are made and read, and what loading one tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class StateDictOptions:
    """How state dicts are made and read. Field names are those of torch.distributed.checkpoint.state_dict.

    ValueError for a field that is no bool, and for ``broadcast_from_rank0`` without ``full_state_dict``.
    """

    full_state_dict: bool = False
    """Whole tensors instead of DTensors."""
    cpu_offload: bool = False
    """When reading: copies on the cpu. Together with ``full_state_dict`` only rank 0 gets them, other ranks an empty dict."""
    ignore_frozen_params: bool = False
    """When reading: without parameters that ask for no gradient. When loading: those may be missing."""
    keep_submodule_prefixes: bool = True
    """When reading ``submodules``: names as they are in the model (True), or as they are in the one submodule (False)."""
    strict: bool = True
    """When loading: missing and unexpected names are an error."""
    broadcast_from_rank0: bool = False
    """When loading: rank 0 has the whole values and sends them one by one; what other ranks give is not read. Rank 0 is the
    lowest rank of the mesh that the model lies on."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if not isinstance(given, bool):
                raise ValueError(f"StateDictOptions.{field.name} must be True or False, got {given!r}")
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError(
                "broadcast_from_rank0=True sends whole tensors: give full_state_dict=True as well, or load shards without it"
            )


class IncompatibleKeys(NamedTuple):
    """Names that did not match; both empty if all did."""

    missing_keys: list[str]
    """Asked for, and not in the state dict: left as they were."""
    unexpected_keys: list[str]
    """In the state dict, and not asked for: not read."""


def checked_options(options: Any) -> StateDictOptions:
    """The options, or the default ones for None."""
    if options is None:
        return StateDictOptions()
    if not isinstance(options, StateDictOptions):
        raise ValueError(f"options must be a hp_fsdp.StateDictOptions, got {type(options).__name__}")
    return options


def refuse_names(what: str, names: IncompatibleKeys, way_out: str) -> None:
    """RuntimeError with both lists unless both are empty."""
    if names.missing_keys or names.unexpected_keys:
        raise RuntimeError(
            f"the state dict does not fit {what}: missing {_shown(names.missing_keys)}; unexpected "
            f"{_shown(names.unexpected_keys)}; {way_out}, or pass StateDictOptions(strict=False)"
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
