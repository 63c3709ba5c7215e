"""One unit: the parameters that are gathered, re-sharded and reduced together, through forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hp_fsdp.options import Options
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.places import Places
from hp_fsdp.reduce import Reduction
from hp_fsdp.shard_gradients import clear_main_grad
from hp_fsdp.states import ShardState, Uses
from hp_fsdp.summation import Summation
from hp_fsdp.unit_parameters import UnitParameters
from hp_platform.platform import Platform


class Unit(UnitParameters):
    """What one ``fully_shard`` call manages. Collectives are launched by :meth:`launch_gather` and :meth:`reduce_gradients` only."""

    def __init__(self, platform: Platform, modules: Sequence[Any], places: Places, options: Options) -> None:
        super().__init__(platform, modules, places, options)
        self.entered: dict[int, Uses | None] = {}
        """The modules that have been called in the running forward, until the last has ended: identity -> what its call counts
        for, or None if that has ended."""
        self.hidden_in_pass: int | None = None
        """The last pass of which no output tells of its backward, though there may be one."""
        self.is_noticed = False
        """Whether an output of the last forward tells of backward."""
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
        self._differentiates_twice = platform.supports("double_backward", places.device)

    # --- backward
    def unrecorded_uses(self, pass_number: int) -> Uses | None:
        """What a call within backward belongs to, if its gradients come by what it records now."""
        found = self.unrecorded
        is_asked = found is not None and found.pass_number == pass_number and self.platform.is_grad_enabled()
        return found if is_asked else None

    def is_outdated(self) -> bool:
        """Whether the shards were written, or may have been, since the last pass has gathered what is there, or kept of it in the small
        world. What was gathered by hand counts as it is.
        """
        is_kept = self.small_world is not None and self.small_world.is_full
        if self.gathered_in_pass is None or (self.state is ShardState.SHARDED and not is_kept):
            return False
        counts = self.platform.supports("version_counter", self.places.device)
        uses = self.uses if counts else None
        if uses is None or uses.pass_number != self.gathered_in_pass:
            return True
        return uses.versions != self.shard_versions()

    def before_backward(self, uses: Uses) -> None:
        """Gradients have reached an output of a call."""
        assert self.context is not None
        self.context.begin_backward()
        self.has_news = True
        if uses not in self.open_uses:
            self._check_versions(uses)
            if self._differentiates_twice and self.platform.is_grad_enabled():
                self._check_stays_whole()
            self.open_uses.append(uses)
        self.context.gather_for_backward(self)  # also for what recomputes a part of the unit's forward

    def _check_versions(self, uses: Uses) -> None:
        """As the framework does for what it has saved itself: whole parameters are filled anew, and it cannot see that."""
        if uses.versions is not None and uses.versions != self.shard_versions():
            raise RuntimeError(
                f"parameters of {self.label} were written between a forward and its backward, which would compute with the new "
                "values: step optimizers and load values after backward, or call forward again"
            )

    def _check_stays_whole(self) -> None:
        """What a recorded backward records holds whole parameters, whose memory must be there for the next one."""
        if self.options.reshard_after_backward and self.arrangement.wholes:
            raise RuntimeError(
                f"a backward that is recorded (create_graph=True) has come to {self.name}, whose whole parameters are freed behind it, and "
                "its own backward needs them: call set_reshard_after_backward(False) on the model before"
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
        if self.platform.is_grad_enabled():
            with self.platform.no_grad():
                self._settle()
        else:
            self._settle()

    def _settle(self) -> None:
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
        # has_put_off_sync: a rank that left those backwards out owes nothing, but others do, and wait for it.
        puts_off = self.owes_sync or self.options.has_put_off_sync
        waits = puts_off or (self.owes_all_reduce and self.options.wishes.all_reduce)
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
        """See :class:`hp_fsdp.reduce.Reduction` and :class:`hp_fsdp.summation.Summation`; parameters that do not train, and owe
        nothing, take no part.
        """
        assert self.context is not None
        trains = self.platform.requires_grads(self.shards())
        if self.owing:
            trains = [flag or param in self.owing for param, flag in zip(self.params, trains, strict=True)]
        taking_part = tuple(trains)
        self.owes_sync = False
        # Not owes_sync: a rank that has left a backward out owes nothing, and would send something else than the others.
        put_off, self.options.has_put_off_sync = self.options.has_put_off_sync, False
        self.owing = set()
        self.owes_all_reduce = not (self.options.wishes.all_reduce or self.places.replicate_group is None)
        streams, wishes = self.context.streams, self.options.wishes
        if self.leaves_dtensors:
            params = [param for param, takes in zip(self.params, taking_part, strict=True) if takes]
            with self.launches["reduce"]:
                self.context.reductions.launch(Summation(streams, params, wishes, self.gradients))
            return
        for lines in self.arrangement.lines(taking_part):
            with self.launches["reduce"]:
                reduction = Reduction(
                    streams,
                    self.places,
                    lines,
                    wishes,
                    self.gradients,
                    is_fused=self.options.is_fused,
                    is_of_one_backward=not put_off,
                    peers=self.peers(),
                )
                self.context.reductions.launch(reduction)

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

    def gradient_came(self) -> None:
        """See :class:`UnitParameters`."""
        context = self.context
        assert context is not None
        if self.has_news:  # asked once per parameter and backward: no call more than it takes
            end = context.end
            if context.in_backward and end is not None and end() is not None:
                return
        super().gradient_came()
        self.has_news = True


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
