"""The features of one module in parts, each cut for itself: fused projections, and heads that several ranks compute.

[Note: fused parameters] Of a fused ``weight (q + k + v, in)`` every rank needs rows of q, of k and of v, which are no piece that a
placement could describe. So a parameter in several parts becomes one DTensor per part, ``weight_q``, ``weight_k`` and
``weight_v``, each cut as usual: checkpoints and optimizers see honest tensors. Forward finds them joined in the old place,
by one copy of this rank's pieces, and so does the module's own initialisation (``init_parameters``), as a whole DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor.chunk import chunk_size
from hp_dtensor.init.in_parts import InParts, set_in_parts
from hp_platform import get_platform
from hp_tp.styles.cuts import ModuleCuts
from hp_tp.styles.door import Door
from hp_tp.styles.heads import check_heads, check_whole_heads, heads_on_rank
from hp_tp.styles.placing import local_of, summed_over

Tensor = Any
Module = Any


@dataclass(frozen=True)
class Part:
    """Some of a module's features, next to each other."""

    name: str
    """"" if the module is one part."""
    size: int
    heads: int | None
    chosen: tuple[int, ...] | None
    """The heads that this rank computes of parameters that are whole everywhere; None: the parameters are cut."""

    def attribute(self, parameter: str) -> str:
        """Where the module keeps this part of a parameter."""
        return f"{parameter}_{self.name}" if self.name else parameter

    @property
    def unit(self) -> int:
        """Features of one head."""
        return self.size // (self.heads or 1)

    def local_size(self, num_ranks: int, rank: int) -> int:
        """How many features forward computes on a rank."""
        if self.chosen is None:
            return chunk_size(self.size, num_ranks, rank)
        return (self.chosen[-1] - self.chosen[0] + 1) * self.unit

    def piece(self, whole: Tensor, dim: int, door: Door) -> Tensor:
        """What forward gets of a local parameter."""
        if self.chosen is None:
            return whole
        start, size = self.chosen[0] * self.unit, (self.chosen[-1] + 1 - self.chosen[0]) * self.unit
        return get_platform().narrow(summed_over(whole, door), dim, start, size)

    def given(self, y: Tensor, dim: int) -> Tensor:
        """The heads of a result in the order in which the queries need them."""
        if self.chosen is None or len(self.chosen) == self.chosen[-1] + 1 - self.chosen[0]:
            return y
        platform = get_platform()
        heads = platform.split(y, [self.unit] * (y.shape[dim] // self.unit), dim)
        return platform.cat([heads[head - self.chosen[0]] for head in self.chosen], dim)


@dataclass(frozen=True)
class Wishes:
    """What ``ColwiseParallel`` was told of parts and heads."""

    parts: Any
    heads: Any
    query_heads: Any
    replicate_kv: bool


def parts_of(
    wishes: Wishes, cuts: ModuleCuts, style: str, kind: str, num_ranks: int, rank: int
) -> tuple[Part, ...]:
    """The parts of a module. ValueError for sizes that are not its features, and for heads that do not divide."""
    sizes = _sizes(wishes.parts, cuts, style, kind)
    heads: Mapping[str, Any]
    if isinstance(wishes.heads, Mapping):
        unknown = [name for name in wishes.heads if name not in sizes or not name]
        if unknown:
            raise ValueError(
                f"{style}: heads names {unknown[0]!r}, which is no part of this {kind}: its parts are "
                f"{', '.join(map(repr, sizes))}"
            )
        heads = wishes.heads
    else:
        heads = dict.fromkeys(sizes, wishes.heads)
    return tuple(
        _part(
            name,
            size,
            heads.get(name),
            wishes,
            style,
            f"part {name!r} of {kind}" if name else kind,
            num_ranks,
            rank,
        )
        for name, size in sizes.items()
    )


def _part(
    name: str, size: int, heads: Any, wishes: Wishes, style: str, kind: str, num_ranks: int, rank: int
) -> Part:
    chosen = None
    if heads is not None:
        if wishes.replicate_kv:
            check_whole_heads(style, kind, heads, size)
            if heads % num_ranks:
                chosen = heads_on_rank(style, kind, heads, wishes.query_heads, num_ranks, rank)
        else:
            check_heads(style, kind, heads, size, num_ranks)
    return Part(name, size, heads, chosen)


def _sizes(parts: Any, cuts: ModuleCuts, style: str, kind: str) -> dict[str, int]:
    assert cuts.features is not None
    if parts is None:
        return {"": cuts.features}
    if isinstance(parts, Mapping):
        sizes = dict(parts)
    elif isinstance(parts, Sequence) and not isinstance(parts, str):
        sizes = {str(i): size for i, size in enumerate(parts)}
    else:
        raise ValueError(f"{style}: parts is a dict from names to sizes, or a list of sizes, got {parts!r}")
    for name, size in sizes.items():
        if not (isinstance(name, str) and name.isidentifier()) and isinstance(parts, Mapping):
            raise ValueError(f"{style}: the name of a part must be an identifier, such as 'q', got {name!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{style}: part {name!r} must have a number of features, got {size!r}")
    if sum(sizes.values()) != cuts.features:
        raise ValueError(
            f"{style}: the parts {sizes} have {sum(sizes.values())} features together, this {kind} has {cuts.features}"
        )
    return sizes


def place_parts(
    module: Module, mesh: Any, cuts: ModuleCuts, parts: Sequence[Part], src_data_rank: int | None
) -> None:
    """Let every part of every parameter be a DTensor. Communication: that of ``distribute_tensor``."""
    platform: Any = get_platform()
    fused: dict[str, InParts] = {}
    for name, dim in cuts.parameters.items():
        whole = platform.get_parameter(module, name)
        is_trained = platform.requires_grad(whole)
        values = platform.detach(whole)
        if dim is None or len(parts) == 1:
            placement = Replicate() if dim is None or parts[0].chosen is not None else Shard(dim)
            placed = distribute_tensor(values, mesh, [placement], src_data_rank=src_data_rank)
            platform.set_parameter(module, name, platform.parameter(placed, requires_grad=is_trained))
            continue
        for part, piece in zip(
            parts, platform.split(values, [part.size for part in parts], dim), strict=True
        ):
            placed = distribute_tensor(
                piece, mesh, [Shard(dim) if part.chosen is None else Replicate()], src_data_rank=src_data_rank
            )
            setattr(module, part.attribute(name), platform.parameter(placed, requires_grad=is_trained))
        platform.set_parameter(module, name, None)
        fused[name] = InParts(tuple(part.attribute(name) for part in parts), dim)
    if fused:
        set_in_parts(module, fused)


def shown(module: Module, cuts: ModuleCuts, parts: Sequence[Part], door: Door) -> dict[str, Tensor]:
    """What forward finds in the places of the parameters."""
    platform, found = get_platform(), {}
    for name, dim in cuts.parameters.items():
        if dim is None:
            # Every rank has a summand of the gradient of what is whole, since forward differs.
            found[name] = summed_over(local_of(platform.get_parameter(module, name)), door)
            continue
        pieces = [part.piece(local_of(getattr(module, part.attribute(name))), dim, door) for part in parts]
        found[name] = pieces[0] if len(pieces) == 1 else platform.cat(pieces, dim)
    return found


def given(y: Tensor, dim: int, parts: Sequence[Part], mesh: Any) -> Tensor:
    """A result as it is handed out: part by part, with the heads that the queries need."""
    if len(parts) == 1:
        return parts[0].given(y, dim)
    if all(part.chosen is None for part in parts):
        return y
    platform, (rank,) = get_platform(), mesh.get_coordinate()
    pieces = platform.split(y, [part.local_size(mesh.shape[0], rank) for part in parts], dim)
    return platform.cat([part.given(piece, dim) for part, piece in zip(parts, pieces, strict=True)], dim)
