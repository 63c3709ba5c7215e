"""``PrepareAttention``: an attention module whose code runs on this rank's heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.placements import Shard
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_tp.plans.overriding import OverridingStyle
from hp_tp.styles.heads import check_heads, heads_on_rank

Tensor = Any
Module = Any
GROUPS = "num_key_value_groups"
"""Attribute of attention modules of the transformers library: how many heads of queries share one of keys."""


class PrepareAttention(OverridingStyle):
    """Let an attention module whose projections give this rank's heads know and tell what it must.

    Args:
        heads: number of heads of the queries.
        kv_heads: number of heads of keys and values.

    Where ``kv_heads`` do not divide over the ranks (``replicate_kv`` of :class:`hp_tp.ColwiseParallel`), fewer heads of queries share one
    of keys on a rank: the module's attribute ``num_key_value_groups`` is set to that number. Results of four dims after the
    first, ``(batch, heads, queries, keys)``, are the attention of this rank's heads: they become DTensors Shard(1), so that
    nobody takes them for all. No parameters, no communication. ValueError for heads that do not divide.
    """

    def __init__(self, *, heads: int, kv_heads: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads

    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """The attention's forward, whose results say how they lie."""
        name, kind, num_ranks = type(self).__name__, type(module).__name__, mesh.shape[0]
        check_heads(name, kind, self.heads, self.heads, num_ranks)
        if self.kv_heads % num_ranks:
            heads_on_rank(name, kind, self.kv_heads, self.heads, num_ranks, 0)
        return OwnHeads(mesh, self.heads)

    def place(self, module: Module, mesh: Any) -> None:
        """Set what the module counts by."""
        super().place(module, mesh)
        num_ranks, (rank,) = mesh.shape[0], mesh.get_coordinate()
        if self.kv_heads % num_ranks and hasattr(module, GROUPS):
            kind = type(module).__name__
            given = heads_on_rank("PrepareAttention", kind, self.kv_heads, self.heads, num_ranks, rank)
            setattr(module, GROUPS, self.heads // num_ranks // len(given))


@dataclass(frozen=True)
class OwnHeads:
    """The forward of attention on this rank's heads."""

    mesh: Any
    heads: int

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = own(*args, **kwargs)
        if not isinstance(result, tuple):
            return result
        return (result[0], *map(self._placed, result[1:]))

    def _placed(self, x: Any) -> Any:
        num_ranks = self.mesh.shape[0]
        if is_dtensor(x) or not get_platform().is_tensor(x) or len(x.shape) != 4:
            return x
        if x.shape[1] * num_ranks != self.heads:
            return x
        shape = (x.shape[0], self.heads, *x.shape[2:])
        return DTensor._wrap(x, make_spec(self.mesh, [Shard(1)], shape))
