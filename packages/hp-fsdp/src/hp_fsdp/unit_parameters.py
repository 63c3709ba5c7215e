"""The parameters of a unit, and where they are: in pieces, gathered, shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.dtensor import local_tensors
from hp_dtensor.gradients import HOOK_KEEPER
from hp_dtensor.marks import forget_marks
from hp_fsdp.arrangement import Arrangement, host_memory
from hp_fsdp.faces import Faces
from hp_fsdp.flat_shards import UnitRows
from hp_fsdp.marks import OWNER_MARK, STAYS
from hp_fsdp.options import Options
from hp_fsdp.owner import Owner
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.peers import Peers, may_reach
from hp_fsdp.places import Places
from hp_fsdp.shard_gradients import ShardGradients
from hp_fsdp.small_world import SmallWorld
from hp_fsdp.states import ShardState
from hp_fsdp.streams import Task
from hp_fsdp.unit_names import NamedLaunch
from hp_platform.peers import may_reach_each_other
from hp_platform.platform import Platform
from hp_platform.protocols.flat_shards import FLAT_SHARDS

if TYPE_CHECKING:
    from hp_fsdp.runtime import RootContext
    from hp_fsdp.unit import Unit


class UnitParameters:
    """The parameters of a unit, and where they are. Their collectives are launched by :meth:`launch_gather` only."""

    def __init__(self, platform: Platform, modules: Sequence[Any], places: Places, options: Options) -> None:
        self.platform = platform
        self.modules = tuple(modules)
        self.label = ", ".join(type(module).__name__ for module in modules)
        range_named = platform.device(places.device).profiler_range
        self.launches = {
            what: NamedLaunch(places.shard_group, f"hp_fsdp.{what} {self.label}", range_named)
            for what in ("gather", "reduce")
        }
        self.called(self.label)
        self.places = places
        self.options = options
        self.params: list[ManagedParameter] = []
        self.ignored: Sequence[Owner] = ()
        """Places in its modules whose parameters stay as they are; see [Note: late parameters]."""
        self.faces = Faces(platform)
        self.leaves_dtensors = False
        """Whether they are DTensors that stay: see [Note: compat] in :mod:`hp_fsdp.summands`."""
        self.arrangement = Arrangement(platform, [], places, options)
        self.gradients = ShardGradients(
            platform,
            places,
            in_main_grad=options.precision.keeps_main_grad,
            host=host_memory(platform, places, options),
        )
        self.flat_shards = UnitRows(self)
        self.hooks: Any = None
        """Its :class:`hp_fsdp.hooks.UnitHooks`."""
        self.parts: list[Unit] = []
        """Of a root: its large layers; see :mod:`hp_fsdp.parts`."""
        self.part_of: Unit | None = None
        self.small_world: SmallWorld | None = None
        """Where whole parameters are kept between forward and backward, if they are cut among fewer ranks then."""
        self.state = ShardState.SHARDED
        self.context: RootContext | None = None
        self._peers: Peers | None = None
        self._peers_in: RootContext | None = None
        """Where :attr:`_peers` was found."""
        self._gathering: Task | None = None
        # --- the course of a step
        self.gathered_in_pass: int | None = None
        """The pass whose forward used what is gathered; None if it was gathered by hand since."""
        self.versions: tuple[int, ...] = ()
        """Of the shards, when they were gathered."""
        self.used_outside_in_pass: int | None = None
        """The last pass in which whole parameters were used outside of the module's forward."""

    def called(self, name: str) -> None:
        """Tell messages about ranks that wait what to call it: by its place, too, once there is a root."""
        self.name = name
        for what, launch in self.launches.items():
            launch.purpose = f"{what} of {name}"

    # --- parameters
    def add(self, params: Sequence[ManagedParameter], *, whole: bool) -> None:
        """Take over parameters; with ``whole`` they are not cut yet."""
        for param in params:
            param.faces = self.faces
            if whole:
                self.arrangement.cut(param)
            setattr(param.parameter, OWNER_MARK, f"{self.label} as {param.name!r}")
            setattr(param.parameter, HOOK_KEEPER, param.gradient_hooks)
            setattr(param.parameter, FLAT_SHARDS, self.flat_shards)
            if param.stays:
                setattr(param.parameter, STAYS, True)
        self._arrange([*self.params, *params])

    def release(self, param: ManagedParameter) -> None:
        """Give one of the parameters away, as a shard."""
        self._arrange([kept for kept in self.params if kept is not param])

    def _arrange(self, params: list[ManagedParameter]) -> None:
        assert self.state is ShardState.SHARDED
        self.params = params
        self.faces.forget()
        with self.platform.recordable():  # parts of the root are made in its first forward
            self.arrangement = Arrangement(self.platform, params, self.places, self.options)

    def refresh(self) -> None:
        """Look at the shards as they are now: the user may have put other objects or other memory there.

        RuntimeError for what does not fit.
        """
        if self.faces.stand() and self.arrangement.stand(self.faces.locals):
            return
        with self.platform.recordable():  # what is made here stays
            changed = [param.adopt() for param in self.params]
            if any(changed):
                self._arrange(self.params)
            self.arrangement.refresh()
        self.faces.remember(self.params)

    def shards(self) -> list[Any]:
        """The local tensors of all parameters, as they were at the last :meth:`refresh`."""
        return self.faces.locals or local_tensors([param.parameter for param in self.params])

    @property
    def copies_between_peers(self) -> bool:
        """Whether gathers and reductions go through the memory of peers, if the ranks reach each other's; see :mod:`hp_fsdp.peers`."""
        options = self.options
        is_wanted = options.zero_copy is not False and options.is_fused and not self.leaves_dtensors
        return is_wanted and may_reach(self.platform, self.places)

    @property
    def expects_peers(self) -> bool:
        """Whether the ranks reach each other's memory and use it, as far as this rank knows: the first gather tells for good."""
        if not self.copies_between_peers:
            return False
        group = self.places.shard_group
        known = None if self.context is None else self.context.knows_reach_of(group)
        return may_reach_each_other(self.places.device, group) if known is None else known

    def peers(self) -> Peers | None:
        """See :meth:`RootContext.peers_of`; asked once per context."""
        context = self.context
        assert context is not None
        if self._peers_in is not context:
            self._peers, self._peers_in = context.peers_of(self), context
        return self._peers

    @property
    def longest_row(self) -> int:
        """Elements of a rank's part of a gather or reduction, at most."""
        return sum(buffer.plan.numel for buffer in self.arrangement.buffers) + 2 * len(self.params)

    # --- gathering
    def launch_gather(self) -> None:
        """Begin to fill the whole parameters with the shards' present values, if they are not there.

        Communication: one all-gather per compute dtype over the shard group.
        """
        if self.state is not ShardState.SHARDED:
            return
        if self.platform.is_grad_enabled():
            with self.platform.no_grad():
                self._launch_gather()
        else:  # as in most backwards: to enter a block takes the host's time
            self._launch_gather()

    def _launch_gather(self) -> None:
        context, small_world = self.context, self.small_world
        assert context is not None
        streams = context.streams
        with self.launches["gather"]:
            start: Callable[[], Callable[[], None]]
            if small_world is not None and small_world.is_full:
                start = functools.partial(small_world.launch, streams.async_op)
            else:
                context.look_at_shards(self)
                start = functools.partial(self.arrangement.launch, streams.async_op, self.peers())
            self.arrangement.allocate()
            for whole in self.faces.dtensors:
                forget_marks(whole)
            self._gathering = streams.run(streams.gather, start)
        if self.options.offload:
            context.reading = self._gathering
        self.state = ShardState.GATHERING

    def unshard(self) -> None:
        """Have the whole parameters there. Nothing to do if they are."""
        if self.state is ShardState.SHARDED:
            self.launch_gather()
        if self.state is ShardState.GATHERING:
            assert self._gathering is not None
            assert self.context is not None
            self._gathering.wait()
            self._gathering = None
            if self.small_world is not None:
                self.small_world.clear()
            if self.context.reading is not None and not self.context.runs:  # [Note: when the host may write]
                self.context.wait_until_read()
            self.versions = () if self.options.reshard_after_backward else self.shard_versions()
            self.state = ShardState.GATHERED

    def show(self) -> None:
        """Have the whole parameters there, and let the modules show them."""
        if self.state is not ShardState.SHOWN:
            self.unshard()
            self.faces.show_wholes(self.params, self)
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
        self.faces.show_shards(self.params)

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
            if self.state is ShardState.GATHERING:
                self.unshard()  # memory that is being filled cannot be freed
            self.hide()
            self.arrangement.free()
            self.state = ShardState.SHARDED
        if self.small_world is not None:
            self.small_world.clear()

    def give_back(self) -> None:
        """As :meth:`reshard`, but for what is being filled, which stays: this waits for nothing. No communication."""
        self.hide()
        if self.state is not ShardState.GATHERING:
            self.reshard()

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
        return not (keeps and counts and self.versions == self.shard_versions())

    def shard_versions(self) -> tuple[int, ...]:
        """How often each shard, and each row as a whole, was written, which the shards do not tell; where the framework
        counts, else zeros.
        """
        rows = [buffer.own_row for buffer in self.arrangement.buffers]
        return tuple(self.platform.versions([*self.shards(), *[row for row in rows if row is not None]]))

    def gradient_came(self) -> None:
        """A backward has added to the gradient of a whole parameter; :class:`hp_fsdp.unit.Unit` says what follows."""
        assert self.context is not None
        self.context.begin_backward()
