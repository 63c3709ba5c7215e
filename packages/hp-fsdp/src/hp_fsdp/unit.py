"""One unit: the parameters that are gathered, re-sharded and reduced together, and the state they are in."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_dtensor.gradients import HOOK_KEEPER
from hp_fsdp.arrangement import Arrangement, host_memory
from hp_fsdp.parameter import OWNER_MARK, ManagedParameter
from hp_fsdp.places import Places
from hp_fsdp.policy import Precision
from hp_fsdp.reduce import Reduction, Wishes
from hp_fsdp.shard_gradients import ShardGradients, clear_main_grad
from hp_fsdp.small_world import SmallWorld
from hp_fsdp.streams import Task
from hp_platform.platform import Platform

if TYPE_CHECKING:
    from hp_fsdp.runtime import RootContext


class ShardState(enum.Enum):
    """Where the unit's parameters are. [Note: shown only while needed] Modules show whole parameters while forward or the
    unit's backward runs, and shards at all other times: what looks at a model between forward and backward meets shards.
    """

    SHARDED = "sharded"
    """No memory is held for whole parameters; the modules show the shards."""
    GATHERING = "gathering"
    """Memory is held, and is being filled; the modules show the shards."""
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
    versions: tuple[int, ...] | None = None
    """Of the shards, when the first of them was gathered for."""
    takes_gradients: bool = False
    """Whether an argument of one of them asks for a gradient."""


@dataclass
class Options:
    """What ``fully_shard`` was told of a unit, and what was changed since."""

    precision: Precision
    reshard_after_forward: bool | int = True
    reshard_as_told: bool | None = None
    """What set_reshard_after_forward said; it also counts for the root."""
    reshard_after_backward: bool = True
    comm_fusion: bool | None = None
    zero_copy: bool | None = None
    offload: bool = False
    pin_memory: bool = True
    sync_gradients: bool = True
    wishes: Wishes = field(default_factory=Wishes)
    forward_prefetch: list[Any] | None = None
    """Units to gather when this one's forward begins; None: by the order of the pass before."""
    backward_prefetch: list[Any] | None = None


class Unit:
    """What one ``fully_shard`` call manages. Collectives are launched by :meth:`launch_gather` and :meth:`reduce_gradients` only."""

    def __init__(self, platform: Platform, modules: Sequence[Any], places: Places, options: Options) -> None:
        self.platform = platform
        self.modules = tuple(modules)
        self.label = ", ".join(type(module).__name__ for module in modules)
        self.places = places
        self.options = options
        self.params: list[ManagedParameter] = []
        self.arrangement = Arrangement(platform, [], places, options)
        self.gradients = ShardGradients(
            platform,
            places,
            in_main_grad=options.precision.keeps_main_grad,
            host=host_memory(platform, places, options),
        )
        self.hooks: Any = None
        """Its :class:`hp_fsdp.hooks.UnitHooks`."""
        self.parts: list[Unit] = []
        """Of a root: its large layers; see :mod:`hp_fsdp.parts`."""
        self.part_of: Unit | None = None
        self.small_world: SmallWorld | None = None
        """Where whole parameters are kept between forward and backward, if they are cut among fewer ranks then."""
        self.state = ShardState.SHARDED
        self.context: RootContext | None = None
        self._gathering: Task | None = None
        # --- the course of a step
        self.gathered_in_pass: int | None = None
        """The pass whose forward used what is gathered; None if it was gathered by hand since."""
        self.versions: tuple[int, ...] = ()
        """Of the shards, when they were gathered."""
        self.entered: set[int] = set()
        """Identities of the modules that have been called in the running forward, until the last has ended."""
        self.hidden_in_pass: int | None = None
        """The last pass of which no output tells of its backward, though there may be one."""
        self.is_noticed = False
        """Whether an output of the last forward tells of backward."""
        self.used_outside_in_pass: int | None = None
        """The last pass in which whole parameters were used outside of the module's forward."""
        self.uses: Uses | None = None
        self.unrecorded: Uses | None = None
        """The calls of the last pass in which some were not recorded; see [Note: recompute] in :mod:`hp_fsdp.hooks`."""
        self.open_uses: list[Uses] = []
        """Passes that the running backward has entered and not left."""
        self.has_news = False
        """Whether the running backward has reached the unit since its last reduction."""
        self.owes_sync = False
        """Whether gradients of earlier backwards wait for one that synchronises."""
        self.owing: set[ManagedParameter] = set()
        """Parameters that trained in those, whether this rank has used them or not; they may be frozen by now."""
        self.owes_all_reduce = False
        """Whether such gradients have been reduced to shards, and wait for the reduction of replicas."""

    # --- parameters
    def add(self, params: Sequence[ManagedParameter], *, whole: bool) -> None:
        """Take over parameters; with ``whole`` they are not cut yet."""
        for param in params:
            if whole:
                self.arrangement.cut(param)
            setattr(param.parameter, OWNER_MARK, f"{self.label} as {param.name!r}")
            setattr(param.parameter, HOOK_KEEPER, param.gradient_hooks)
        self._arrange([*self.params, *params])

    def release(self, param: ManagedParameter) -> None:
        """Give one of the parameters away, as a shard."""
        self._arrange([kept for kept in self.params if kept is not param])

    def _arrange(self, params: list[ManagedParameter]) -> None:
        assert self.state is ShardState.SHARDED
        self.params = params
        with self.platform.recordable():  # parts of the root are made in its first forward
            self.arrangement = Arrangement(self.platform, params, self.places, self.options)

    def refresh(self) -> None:
        """Look at the shards as they are now: the user may have put other objects or other memory there.

        RuntimeError for what does not fit.
        """
        with self.platform.recordable():  # what is made here stays
            changed = [param.adopt() for param in self.params]
            if any(changed):
                self._arrange(self.params)
            self.arrangement.refresh()

    # --- gathering
    def launch_gather(self) -> None:
        """Begin to fill the whole parameters with the shards' present values, if they are not there.

        Communication: one all-gather per compute dtype over the shard group.
        """
        if self.state is not ShardState.SHARDED:
            return
        assert self.context is not None
        streams = self.context.streams
        small_world = self.small_world
        with self.platform.no_grad(), self._named("gather"):
            if small_world is not None and small_world.is_full:
                start = small_world.launch
            else:
                self.context.look_at_shards(self)
                start = self.arrangement.launch
            self.arrangement.allocate()
            self._gathering = streams.run(streams.gather, lambda: start(streams.async_op))
        if self.options.offload:
            self.context.reading = self._gathering
        self.state = ShardState.GATHERING

    def unshard(self) -> None:
        """Have the whole parameters there. Nothing to do if they are."""
        self.launch_gather()
        if self.state is ShardState.GATHERING:
            assert self._gathering is not None
            assert self.context is not None
            with self.platform.no_grad():
                self._gathering.wait()
            self._gathering = None
            if self.small_world is not None:
                self.small_world.clear()
            if not self.context.runs:  # [Note: when the host may write]
                self.context.wait_until_read()
            self.versions = self._versions()
            self.state = ShardState.GATHERED

    def show(self) -> None:
        """Have the whole parameters there, and let the modules show them."""
        self.unshard()
        if self.state is ShardState.GATHERED:
            for param in self.params:
                param.show_full(self._gradient_came)
            self.state = ShardState.SHOWN
        for part in self.parts:
            part.stand_by()

    def hide(self) -> None:
        """Let the modules show shards; whole parameters that are there stay."""
        if self.state is ShardState.SHOWN:
            self.state = ShardState.GATHERED
            self._show_no_more()
            for part in self.parts:
                part.hide()
                part._show_no_more()

    def _show_no_more(self) -> None:
        if self.part_of is not None and self.part_of.state is ShardState.SHOWN:
            self.stand_by()
            return
        for param in self.params:
            param.show_shard()

    def stand_by(self) -> None:
        """Let the modules show stand-ins; see [Note: stand-ins]."""
        if self.state is not ShardState.SHOWN:
            if self.state is ShardState.SHARDED and self.context is not None:
                self.context.look_at_shards(self)  # before what the user has put there is covered
            for param in self.params:
                param.show_stand_in(self._wanted)

    def _wanted(self) -> None:
        """An operation needs the whole parameters, outside of the module's forward."""
        assert self.context is not None
        # No output of the module tells of this use's backward.
        self.used_outside_in_pass = self.context.pass_number
        self.context.gather_on_demand(self)

    def reshard(self) -> None:
        """Free the whole parameters. No communication."""
        if self.state is not ShardState.SHARDED:
            self.unshard()  # memory that is being filled cannot be freed
            self.hide()
            self.arrangement.free()
            self.state = ShardState.SHARDED
        if self.small_world is not None:
            self.small_world.clear()

    def reshard_to_small_world(self) -> None:
        """Keep of the whole parameters what :class:`SmallWorld` keeps, and free them. No communication."""
        self.hide()
        if self.state is ShardState.GATHERED:
            assert self.small_world is not None
            with self.platform.no_grad():
                self.small_world.fill(self.arrangement.wholes)
            self.arrangement.free()
            self.state = ShardState.SHARDED

    def is_stale(self, pass_number: int) -> bool:
        """Whether what is gathered, or kept of it in the small world, may be older than the shards."""
        is_kept = self.small_world is not None and self.small_world.is_full
        if self.state is ShardState.SHARDED and not is_kept:
            return False
        if self.gathered_in_pass is None or self.gathered_in_pass == pass_number:
            return False
        keeps = not self.options.reshard_after_backward
        counts = self.platform.supports("version_counter", self.places.device)
        return not (keeps and counts and self.versions == self._versions())

    def _versions(self) -> tuple[int, ...]:
        return () if self.options.reshard_after_backward else self.shard_versions()

    def shard_versions(self) -> tuple[int, ...]:
        """How often each shard was written, where the framework counts; else zeros."""
        return tuple(self.platform.version(param.shard) for param in self.params)

    # --- backward
    def unrecorded_uses(self, pass_number: int) -> Uses | None:
        """What a call within backward belongs to, if its gradients come by what it records now."""
        found = self.unrecorded
        is_asked = found is not None and found.pass_number == pass_number and self.platform.is_grad_enabled()
        return found if is_asked else None

    def before_backward(self, uses: Uses) -> None:
        """Gradients have reached an output of a call."""
        assert self.context is not None
        self.context.begin_backward()
        self.has_news = True
        if uses not in self.open_uses:
            self._check_versions(uses)
            self.open_uses.append(uses)
        self.context.gather_for_backward(self)  # also for what recomputes a part of the unit's forward

    def _check_versions(self, uses: Uses) -> None:
        """As the framework does for what it has saved itself: whole parameters are filled anew, and it cannot see that."""
        if uses.versions is not None and uses.versions != self.shard_versions():
            raise RuntimeError(
                f"parameters of {self.label} were written between a forward and its backward, which would compute with the new "
                "values: step optimizers and load values after backward, or call forward again"
            )

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
        outside = self.used_outside_in_pass
        # A use outside of the module's calls is left nobody knows when: at the end at the latest.
        if not self.open_uses and (outside is None or outside < uses.pass_number):
            self.settle()

    def settle(self) -> None:
        """Reduce what has come, or set it aside, and re-shard."""
        with self.platform.no_grad():
            if self.options.sync_gradients:
                self.reduce_gradients()
            else:
                for param in self.params:
                    param.keep_gradient()
                    if param.trains:
                        self.owing.add(param)
                self.owes_sync = True
            self.has_news = False
            self._end_of_backward()

    def finish_backward(self) -> None:
        """The backward is over: settle what could not be before, and re-shard in any case."""
        waits = self.owes_sync or (self.owes_all_reduce and self.options.wishes.all_reduce)
        if self.has_news or (waits and self.options.sync_gradients):
            self.settle()
        for uses in self.open_uses:
            uses.num_done = 0
        self.open_uses = []
        self._end_of_backward()

    def _end_of_backward(self) -> None:
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self.hide()

    def reduce_gradients(self) -> None:
        """See :class:`hp_fsdp.reduce.Reduction`; parameters that do not train, and owe nothing, take no part."""
        assert self.context is not None
        taking_part = tuple(param.trains or param in self.owing for param in self.params)
        self.owes_sync = False
        self.owing = set()
        self.owes_all_reduce = not (self.options.wishes.all_reduce or self.places.replicate_group is None)
        for lines in self.arrangement.lines(taking_part):
            with self._named("reduce"):
                reduction = Reduction(
                    self.context.streams, self.places, lines, self.options.wishes, self.gradients
                )
                self.context.launch(reduction)

    def forget_backward(self) -> None:
        """Of a backward that was left by an exception nothing counts that has not been reduced."""
        for uses in self.open_uses:
            uses.num_done = 0
        self.open_uses = []
        self.has_news = False
        for param in self.params:
            param.forget_backward()
        self.reshard()

    def forget_gradients(self) -> None:
        """Of the whole parameters, and what waits for a reduction of replicas."""
        for param in self.params:
            param.forget_gradients()
            clear_main_grad(param)
        self.gradients.forget()
        self.owes_sync = self.owes_all_reduce = False
        self.owing = set()

    def _gradient_came(self) -> None:
        assert self.context is not None
        self.context.begin_backward()
        self.has_news = True

    def _named(self, what: str) -> Any:
        return self.platform.device(self.places.device).profiler_range(f"hp_fsdp.{what} {self.label}")


def units_in(platform: Platform, module: Any) -> Iterable[Unit]:
    """The units of ``module`` and of everything in it, outer ones first, each once."""
    seen: set[int] = set()
    for _, found in platform.named_modules(module):
        unit = unit_of(found)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


UNIT_ATTRIBUTE = "_hp_fsdp_unit"
"""Where a sharded module keeps its unit."""


def unit_of(module: Any) -> Unit | None:
    """The unit of this very module, or None."""
    return getattr(module, UNIT_ATTRIBUTE, None)
