"""What stands at the doors of a whole model, of its stack of layers, and of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor, ParallelStyle, Placement, Replicate
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.nest import map_leaves
from hp_dtensor.placements import Shard
from hp_platform import get_platform
from hp_tp.plans.replicated import own_pieces, place_whole
from hp_tp.styles.cutting import check_line
from hp_tp.styles.placing import run_with

Tensor = Any
Module = Any


class PrepareModel(ParallelStyle):
    """Let a model take whole plain tensors and give whole plain tensors, whatever lies within.

    Args:
        input_layouts: how hidden states lie inside, for a model without embedding (its first argument): it is brought there. None
            (default): its inputs stay as they are.
        hidden_arguments: names of arguments with hidden states, such as ``inputs_embeds``, which are brought there.
        hidden_layouts: where these are brought.
        cut_logits: whether results that are cut along their last dim, the classes, stay DTensors while gradients are recorded:
            for losses that need no whole logits. Without gradients (``generate``, evaluation) they are whole.

    Results may be nested in tuples and dicts. Its own parameters become DTensors Replicate. Communication: for a result that is
    cut one all-gather, in backward none.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        hidden_arguments: tuple[str, ...] = (),
        hidden_layouts: Placement | None = None,
        cut_logits: bool = False,
    ) -> None:
        self.input_layouts, self.cut_logits = input_layouts, cut_logits
        self.hidden_arguments, self.hidden_layouts = tuple(hidden_arguments), hidden_layouts

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Run the model's forward between its doors."""
        check_line(device_mesh, "PrepareModel")
        place_whole(module, device_mesh, self.src_data_rank)
        named: dict[str, Placement | None] = dict.fromkeys(self.hidden_arguments, self.hidden_layouts)
        forward = WholeModel(device_mesh, self.input_layouts, named, self.cut_logits)
        get_platform().override_forward(module, forward)
        return module


@dataclass(frozen=True)
class WholeModel:
    """The forward of a model between plain tensors."""

    mesh: Any
    first: Placement | None
    named: dict[str, Placement | None]
    cut_logits: bool

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.first is not None and args:
            args = (self._brought(args[0], self.first), *args[1:])
        for name, placement in self.named.items():
            if placement is not None and name in kwargs:
                kwargs = {**kwargs, name: self._brought(kwargs[name], placement)}
        return map_leaves(self._whole, own(*args, **kwargs))

    def _brought(self, x: Any, placement: Placement) -> Any:
        if not get_platform().is_tensor(x) or len(x.shape) < 2:
            return x
        return whole_dtensor(x, self.mesh).redistribute(placements=[placement])

    def _whole(self, x: Any) -> Any:
        if not is_dtensor(x):
            return x
        platform = get_platform()
        is_cut = isinstance(x.placements[0], Shard) and x.placements[0].dim == len(x.shape) - 1 > 0
        if self.cut_logits and is_cut and platform.is_grad_enabled() and x.requires_grad:
            return x
        return x.full_tensor()


def whole_dtensor(x: Any, mesh: Any) -> Any:
    """A DTensor as it is; a plain tensor, which is equal on all ranks, as a Replicate."""
    return x if is_dtensor(x) else DTensor.from_local(x, mesh, [Replicate()], shape=tuple(x.shape))


class PrepareMixture(ParallelStyle):
    """Let a mixture of experts see the whole hidden states as a plain tensor, and bring its result back to where they came from.

    Args:
        output_layouts: how the first result (it is whole and plain) shall lie.
        use_local_output: whether it is handed out as a plain tensor.

    Hidden states, the first argument, may be a DTensor or a plain tensor, which is taken to be whole. Inside, every rank routes every
    token alike; what cuts the experts sums their results itself. Communication per call: to bring
    hidden states that are cut along the sequence one all-gather; in backward one all-gather of the result's gradient.
    """

    def __init__(self, *, output_layouts: Placement, use_local_output: bool) -> None:
        self.output_layouts, self.use_local_output = output_layouts, use_local_output

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Run the mixture's forward between its doors."""
        check_line(device_mesh, "PrepareMixture")
        place_whole(module, device_mesh, self.src_data_rank)
        forward = BetweenDoors(device_mesh, self.output_layouts, self.use_local_output)
        get_platform().override_forward(module, forward)
        return module


@dataclass(frozen=True)
class BetweenDoors:
    """The forward of a module that computes whole, where its surroundings are cut."""

    mesh: Any
    wanted: Placement
    use_local: bool

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if args:
            args = (self._whole(args[0]), *args[1:])
        else:
            first = next(iter(kwargs), None)
            kwargs = kwargs if first is None else {**kwargs, first: self._whole(kwargs[first])}
        result = run_with(module, own_pieces(module), own, args, kwargs)
        if isinstance(result, tuple):
            return (self._back(result[0]), *result[1:])
        return self._back(result)

    def _whole(self, x: Any) -> Tensor:
        return whole_dtensor(x, self.mesh).full_tensor()

    def _back(self, y: Tensor) -> Any:
        placed = whole_dtensor(y, self.mesh).redistribute(placements=[self.wanted])
        return placed.to_local() if self.use_local else placed
