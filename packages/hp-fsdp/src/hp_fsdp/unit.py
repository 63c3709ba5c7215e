"""One unit: the parameters that are gathered, re-sharded and reduced together, and the state they are in."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.gather import gather_columns
from hp_fsdp.layout import plan_rows
from hp_fsdp.parameter import OWNER_MARK, ManagedParameter
from hp_fsdp.places import Places
from hp_fsdp.policy import Precision
from hp_fsdp.reduce import average_gradients
from hp_platform.platform import Platform

if TYPE_CHECKING:
    from hp_fsdp.runtime import RootContext


class ShardState(enum.Enum):
    """Where the unit's parameters are. [Note: shown only while needed] Modules show whole parameters while forward or the
    unit's backward runs, and shards at all other times: what looks at a model between forward and backward meets shards.
    """

    SHARDED = "sharded"
    """No memory is held for whole parameters; the modules show the shards."""
    GATHERED = "gathered"
    """Whole parameters are there, for backward or for the next forward; the modules show the shards."""
    SHOWN = "shown"
    """Whole parameters are there, and the modules show them."""


@dataclass(eq=False)
class Uses:
    """The calls of a unit within one pass (one call of the outermost module), as far as backward must wait for them."""

    pass_number: int
    num_calls: int = 0
    num_done: int = 0
    """How many of them a backward has left through their inputs."""


class Unit:
    """What one ``fully_shard`` call manages. Collectives are launched by :meth:`unshard` and :meth:`reduce_gradients` only."""

    def __init__(
        self,
        platform: Platform,
        module: Any,
        places: Places,
        precision: Precision,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self.platform = platform
        self.module = module
        self.label = type(module).__name__
        self.places = places
        self.precision = precision
        self.params: list[ManagedParameter] = []
        self.buffers: list[FlatBuffer] = []
        self.state = ShardState.SHARDED
        self.context: RootContext | None = None
        self.sync_gradients = True
        self.reshard_by_default = reshard_after_forward
        self.reshard_as_told: bool | None = None
        """What set_reshard_after_forward said; it also counts for the root."""
        # --- the course of a step
        self.gathered_in_pass: int | None = None
        """The pass whose forward used what is gathered; None if it was gathered by hand since."""
        self.uses: Uses | None = None
        self.open_uses: list[Uses] = []
        """Passes that the running backward has entered and not left."""
        self.has_news = False
        """Whether the running backward has reached the unit since its last reduction."""
        self.owes_sync = False
        """Whether gradients of earlier backwards wait for one that synchronises."""

    # --- parameters
    def add(self, params: Sequence[ManagedParameter], *, whole: bool) -> None:
        """Take over parameters; with ``whole`` they are not cut yet."""
        for param in params:
            if whole:
                slot = plan_rows([param.shape], self.places.num_shards).slots[0] if param.shape else None
                param.cut(slot, self.places)
            setattr(param.parameter, OWNER_MARK, f"{self.label} as {param.name!r}")
        self._arrange([*self.params, *params])

    def release(self, param: ManagedParameter) -> None:
        """Give one of the parameters away, as a shard."""
        self._arrange([kept for kept in self.params if kept is not param])

    def _arrange(self, params: list[ManagedParameter]) -> None:
        """Lay out the buffers, and make the whole tensors."""
        assert self.state is ShardState.SHARDED
        places = self.places
        kinds: dict[tuple[Any, bool], list[ManagedParameter]] = {}
        for param in params:
            if param.shape:
                kinds.setdefault((param.dtype, param.trains), []).append(param)
        self.params = params
        self.buffers = [
            FlatBuffer(self.platform, kind, places.num_shards, places.shard_rank, places.device)
            for kind in kinds.values()
        ]
        for param in params:
            param.make_full(self.precision, places.device)

    # --- gathering
    def unshard(self) -> None:
        """Have the whole parameters there. Nothing to do if they are.

        Communication: one all-gather per compute dtype over the shard group.
        """
        if self.state is ShardState.SHARDED:
            self.gather()
            self.state = ShardState.GATHERED

    def show(self) -> None:
        """Have the whole parameters there, and let the modules show them."""
        self.unshard()
        if self.state is ShardState.GATHERED:
            for param in self.params:
                param.show_full(self._gradient_came)
            self.state = ShardState.SHOWN

    def hide(self) -> None:
        """Let the modules show shards; whole parameters that are there stay."""
        if self.state is ShardState.SHOWN:
            for param in self.params:
                param.show_shard()
            self.state = ShardState.GATHERED

    def gather(self) -> None:
        """Fill the whole tensors with the shards' present values, also if they are filled already."""
        platform = self.platform
        with platform.no_grad(), self._named("gather"):
            columns = gather_columns(platform, self.buffers, self.places, self.precision.compute_dtype)
            scalars = [(p, platform.detach(p.shard)) for p in self.params if p.slot is None]
            parts = [*columns, *scalars]
            # The values are those that autograd has seen before: see [Note: one whole tensor for ever].
            with platform.preserve_version([param.full for param, _ in parts]):
                targets = [param.allocate() for param, _ in parts]
                platform.foreach_copy_(targets, [values for _, values in parts])

    def reshard(self) -> None:
        """Free the whole parameters. No communication."""
        self.hide()
        if self.state is ShardState.GATHERED:
            for param in self.params:
                param.free()
            self.state = ShardState.SHARDED

    # --- backward
    def before_backward(self, uses: Uses) -> None:
        """Gradients have reached an output of a call."""
        assert self.context is not None
        self.context.begin_backward()
        self.has_news = True
        if uses not in self.open_uses:
            self.open_uses.append(uses)
        self.show()  # also for what recomputes a part of the unit's forward

    def after_backward(self, uses: Uses) -> None:
        """Gradients have left through the inputs of a call: everything that this call adds is there.

        Which calls have been left is the same on all ranks, whatever branches they took inside; which parameters have
        gradients is not. So only the former decides when to reduce.
        """
        uses.num_done = uses.num_done + 1
        if uses.num_done < uses.num_calls:
            return
        uses.num_done = 0  # for another backward through the same graph
        self.open_uses = [other for other in self.open_uses if other is not uses]
        if not self.open_uses:
            self.settle()

    def settle(self) -> None:
        """Reduce what has come, or set it aside, and re-shard."""
        with self.platform.no_grad():
            if self.sync_gradients:
                self.reduce_gradients()
            else:
                for param in self.params:
                    param.keep_gradient()
                self.owes_sync = True
            self.has_news = False
            self.reshard()

    def finish_backward(self) -> None:
        """The backward is over: settle what could not be before, and re-shard in any case."""
        if self.has_news or (self.owes_sync and self.sync_gradients):
            self.settle()
        for uses in self.open_uses:
            uses.num_done = 0
        self.open_uses = []
        self.reshard()

    def reduce_gradients(self) -> None:
        """See :func:`hp_fsdp.reduce.average_gradients`; parameters that do not train now take no part."""
        training = [param for param in self.params if param.trains]
        self.owes_sync = False
        if training:
            with self._named("reduce"):
                average_gradients(self.platform, training, self.places)

    def _gradient_came(self) -> None:
        assert self.context is not None
        self.context.begin_backward()
        self.has_news = True

    def _named(self, what: str) -> Any:
        return self.platform.device(self.places.device).profiler_range(f"hp_fsdp.{what} {self.label}")


def units_in(platform: Platform, module: Any) -> Iterable[Unit]:
    """The units of ``module`` and of everything in it, outer ones first."""
    for _, found in platform.named_modules(module):
        unit = unit_of(found)
        if unit is not None:
            yield unit


UNIT_ATTRIBUTE = "_hp_fsdp_unit"
"""Where a sharded module keeps its unit."""


def unit_of(module: Any) -> Unit | None:
    """The unit of this very module, or None."""
    return getattr(module, UNIT_ATTRIBUTE, None)
