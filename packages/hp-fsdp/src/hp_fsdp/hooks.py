"""The four moments of a unit: before and after forward, before and after backward."""

from __future__ import annotations

from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from hp_dtensor import DTensor
from hp_dtensor.running_module import is_in_forward
from hp_fsdp.inputs import Inputs, cast_floating
from hp_fsdp.outputs import Outputs
from hp_fsdp.roots import context_of, reshards_after_forward
from hp_fsdp.states import ShardState, Uses
from hp_fsdp.unit import Unit, units_in

RUN_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType)
"""What functions with yield, and asynchronous ones, return: nothing of them has run."""


class UnitHooks:
    """[Note: backward hooks on tensors] Before backward: a hook on every output that takes part in it. After backward: an
    identity node around the inputs, whose backward runs when all gradients of the inputs are known. A unit whose inputs
    take no part in backward (the first one, which reads tokens) is settled when the backward ends.

    [Note: outputs of skipped units] What a rank's call has not computed (zeros in place of a layer that this rank leaves out)
    asks for no gradient, and that rank would launch none of what the others launch in backward. So where a unit could be asked
    and no output asks, its floating outputs take part in the graph: no gradient leaves them, but that one came is noticed.

    [Note: recompute] A forward that runs inside of a backward re-makes activations (checkpointing). It must neither re-shard
    the unit nor count as a call of the pass. Where the forward of before was recorded, the hook on its outputs has gathered
    the unit, and what is recorded now is not walked. Where it was not (reentrant checkpoints), a backward within the backward
    walks what is recorded now; it is noticed, so that the unit is settled when all of its calls have been left.

    [Note: units of several modules] They gather when the first of their modules is called, and re-shard when the last has
    ended: a round. Every call of a module counts. Where some of them are not called, the round ends with the outermost module's
    pass, or when it turns out that the shards were written since.

    [Note: calls within calls] A method that was registered may call the module itself, and forward such a method. All is there
    then, and stays until the outermost call has ended.

    [Note: calls that fail] An exception that leaves a call re-shards what the call has gathered; one that leaves the outermost
    call takes back its whole pass. So whoever catches it finds shards, and their memory alone. Of a recomputation nothing is
    taken back: checkpoints end it by an exception of their own, and backward re-shards the unit as ever.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.platform = unit.platform
        self._inputs = Inputs(unit)
        self._outputs = Outputs(unit)
        self._in_methods: list[Any] = []
        """Modules of which a registered method runs, innermost last."""
        self._has_nested = False
        """Whether a call within a call has begun."""
        self._has_values = False
        self._counts_writes = unit.platform.supports("version_counter", unit.places.device)
        self._versions: tuple[int, ...] = ()
        """Of the shards of a unit of several modules, when they were gathered for forward."""

    def install(self) -> None:
        """Register both forward hooks; ours runs before the user's, and after them."""
        for module in self.unit.modules:
            self.platform.register_forward_pre_hook(module, self.before_forward, prepend=True)
            self.platform.register_forward_hook(module, self.after_forward)
        self.platform.run_uncompiled([self.last_pass, self.failed])

    def before_forward(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Cast inputs, gather, and notice when backward leaves."""
        unit, platform = self.unit, self.platform
        context = context_of(unit)
        self.check_values()
        dtype = unit.options.precision.input_dtype
        if dtype is not None:
            args, kwargs = self._inputs.cast(args, kwargs, dtype)
        if context.in_backward:
            context.forget_dead_backward()
        if context.in_backward:  # [Note: recompute]
            unit.show()
            uses = unit.unrecorded_uses(context.pass_number)
            return (args, kwargs) if uses is None else self._inputs.notice(args, kwargs, uses)
        if id(module) in unit.entered and self._is_running(module):
            self._has_nested = True
            return args, kwargs
        # A module that has been called already in this round: the one before was left by an exception, or half of it ran.
        is_first = not unit.entered or id(module) in unit.entered or self._is_over()
        if is_first:
            context.enter(unit)
            unit.entered = {}
        unit.entered[id(module)] = None
        if is_first:
            context.gather_for_forward(unit)
            self._versions = self._versions_of_shards()
        else:
            unit.show()
        if platform.is_grad_enabled():
            if unit.uses is None or unit.uses.pass_number != context.pass_number:
                unit.uses = Uses(context.pass_number, versions=unit.shard_versions())
            uses = unit.uses
            args, kwargs = self._inputs.notice(args, kwargs, uses)
        else:
            if unit.unrecorded is None or unit.unrecorded.pass_number != context.pass_number:
                unit.unrecorded = Uses(context.pass_number)
            uses = unit.unrecorded
        uses.num_calls = uses.num_calls + 1
        unit.entered[id(module)] = uses
        return args, kwargs

    def after_forward(self, module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
        """Cast outputs, notice when backward comes, and re-shard."""
        unit, platform = self.unit, self.platform
        if isinstance(output, RUN_LATER):
            raise RuntimeError(
                f"a call of {unit.name} gave a {type(output).__name__}, whose body runs when the call has ended, and shows no whole "
                "parameters by then: let it return a list of what it yields, or a tensor, or call fully_shard on the modules that it "
                "calls instead of this one"
            )
        context = context_of(unit)
        if unit.options.precision.output_dtype is not None:
            output = cast_floating(platform, output, unit.options.precision.output_dtype)
        output = self._outputs.apart(output)
        if context.in_backward:  # [Note: recompute]
            uses = unit.unrecorded_uses(context.pass_number)
            if uses is not None:
                self._outputs.notice(output, uses)
            return output
        if self._has_nested and self._is_running(module):
            return output
        self._has_nested = False
        is_last = len(unit.entered) == len(unit.modules)
        unit.entered[id(module)] = None
        if is_last:
            unit.entered = {}
            context.leave(unit)
        elif not any(self._is_running(other) for other in unit.modules if other is not module):
            unit.hide()
        if not platform.is_grad_enabled():
            if is_last:
                for each in (unit, *unit.parts):
                    each.reshard()
            return output
        assert unit.uses is not None
        unit.is_noticed = self._outputs.notice(output, unit.uses)
        if not unit.is_noticed and self._may_be_asked(module, unit.uses):
            output = self._outputs.attached(output, self._inputs.first)
            unit.is_noticed = self._outputs.notice(output, unit.uses)
            if not unit.is_noticed:
                # No output can tell of backward (an object of an unknown class): what it needs must stay where it is.
                unit.hidden_in_pass = context.pass_number
        self._inputs.first = None
        if is_last:
            unit.hide()
            needs_whole = context.pass_number in (unit.hidden_in_pass, unit.used_outside_in_pass)
            if not unit.is_noticed and not needs_whole:  # no backward will come
                for each in (unit, *unit.parts):
                    each.reshard()
            elif reshards_after_forward(unit) and not needs_whole:
                if unit.small_world is not None:
                    unit.reshard_to_small_world()
                else:
                    unit.reshard()
        return output

    def last_pass(self) -> int:
        """The number of the model's last pass; 0: there was none."""
        return 0 if self.unit.context is None else self.unit.context.pass_number

    def failed(self, module: Any, last_pass: int) -> None:
        """A call of the module was left by an exception; ``last_pass`` is of when it began. See [Note: calls that fail]."""
        unit = self.unit
        context = unit.context
        if context is None or context.in_backward or self._is_running(module):
            return
        uses = unit.entered.get(id(module))
        if uses is not None:  # backward need not wait for it
            uses.num_calls = uses.num_calls - 1
            unit.entered[id(module)] = None
        if not any(self._is_running(other) for other in unit.modules):
            self._has_nested = False
            self._inputs.first = None
            context.give_up(unit, last_pass)

    def _is_over(self) -> bool:
        """Whether what a round of several modules has gathered is gone, or may be older than the shards: some of them did not run,
        and nobody outside has ended the round.
        """
        unit = self.unit
        if len(unit.modules) == 1:
            return False
        if unit.state in (ShardState.SHARDED, ShardState.GATHERING):
            return True
        if not self._counts_writes:
            assert unit.context is not None
            return unit.context.root is unit
        return self._versions != self._versions_of_shards()

    def _versions_of_shards(self) -> tuple[int, ...]:
        if len(self.unit.modules) == 1 or not self._counts_writes:
            return ()
        return tuple(self.platform.version(param.shard) for param in self.unit.params)

    def check_values(self) -> None:
        """RuntimeError with the names of all parameters and buffers in the unit that are on the meta device, once."""
        if self._has_values:
            return
        platform, found = self.platform, []
        for number, module in enumerate(self.unit.modules):
            where = f"{number}." if len(self.unit.modules) > 1 else ""
            for name, x in (*platform.named_parameters(module), *platform.named_buffers(module)):
                if platform.device_of(x.to_local() if isinstance(x, DTensor) else x).startswith("meta"):
                    found.append(f"{where}{name}")
        if found:
            raise RuntimeError(
                f"of {self.unit.label} these are on the meta device and have no values: {', '.join(found)}. After fully_shard "
                "give them memory and values: hp_dtensor.init_parameters(model) does both (in torch also "
                "model.to_empty(device=...), and then what initialises or set_model_state_dict)"
            )
        self._has_values = True

    def run(self, module: Any, method: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A method of the module as its forward is run."""
        last_pass = self.last_pass()
        try:
            args, kwargs = self.before_forward(module, args, kwargs)
            self._in_methods.append(module)
            try:
                output = method(*args, **kwargs)
            finally:
                self._in_methods.pop()
            return self.after_forward(module, args, kwargs, output)
        except BaseException:
            self.failed(module, last_pass)
            raise

    def _may_be_asked(self, module: Any, uses: Uses) -> bool:
        """Whether a backward may come to a call of the module although its output shows no tensor that asks for a gradient."""
        units = (self.unit, *self.unit.parts, *units_in(self.platform, module))
        return uses.takes_gradients or any(param.trains for each in units for param in each.params)

    def _is_running(self, module: Any) -> bool:
        """See [Note: calls within calls]."""
        return any(module is each for each in self._in_methods) or is_in_forward(module)
