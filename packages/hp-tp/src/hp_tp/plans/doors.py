"""What stands at the doors of a whole model, of its layers, and of a mixture of experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor, Placement, Replicate
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.nest import map_leaves
from hp_dtensor.placements import Shard
from hp_platform import get_platform
from hp_tp.loss.context import loss_parallel
from hp_tp.plans.overriding import OverridingStyle
from hp_tp.plans.replicated import own_pieces
from hp_tp.styles.collectives import Collectives, Transfer, of_move
from hp_tp.styles.placing import run_with

Tensor = Any
Module = Any


class PrepareHidden(OverridingStyle):
    """Bring hidden states that are given to a module as whole plain tensors to where they lie between its layers.

    Args:
        arguments: names of arguments of its forward; None (default): the first one.
        layouts: where they are brought. DTensors are redistributed there, too.

    What is no tensor of three dims, ``(batch, sequence, hidden)``, passes as it is. The module's own parameters become DTensors
    Replicate. Communication: for what is whole none, in backward one all-gather.
    """

    def __init__(self, *, arguments: Sequence[str] | None = None, layouts: Placement) -> None:
        self.arguments = None if arguments is None else tuple(arguments)
        self.layouts = layouts

    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """The module's forward behind its door."""
        return BehindDoor(mesh, self.layouts, argument_places(module, self.arguments))


@dataclass(frozen=True)
class BehindDoor:
    """The forward of a module whose hidden states are brought in."""

    mesh: Any
    wanted: Placement
    places: tuple[tuple[int, str], ...]
    """Position and name of each argument."""

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = self.brought(args, kwargs)
        return own(*args, **kwargs)

    def brought(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in their places."""
        for position, name in self.places:
            if position < len(args):
                args = (*args[:position], self._moved(args[position]), *args[position + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: self._moved(kwargs[name])}
        return args, kwargs

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`: DTensors usually lie as they shall."""
        num_ranks = self.mesh.shape[0]
        return (
            Collectives()
            if num_ranks == 1
            else of_move(Replicate(), self.wanted, "a plain input", None, num_ranks)
        )

    def _moved(self, x: Any) -> Any:
        if not get_platform().is_tensor(x) or len(x.shape) != 3:
            return x
        return whole_dtensor(x, self.mesh).redistribute(placements=[self.wanted])


def argument_places(module: Module, arguments: Sequence[str] | None) -> tuple[tuple[int, str], ...]:
    """Positions and names of arguments of the module's forward. ValueError for names that it has not."""
    function = getattr(module, "forward", None) or module.construct
    known = list(inspect.signature(function).parameters)
    if arguments is None:
        return ((0, known[0]),) if known else ()
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"PrepareHidden: forward of {type(module).__name__} has no argument {name!r}; it has {', '.join(known)}"
            )
    return tuple((known.index(name), name) for name in arguments)


class PrepareModel(OverridingStyle):
    """Let a model take whole plain tensors and give whole plain tensors, whatever lies within.

    Args:
        arguments: names of arguments with hidden states, which are brought to ``layouts``; None: the first one.
        layouts: how hidden states lie inside; None (default): the arguments stay as they are.
        cut_logits: whether results that are cut along their last dim, the classes, stay DTensors while gradients are recorded:
            for losses that need no whole logits, such as the model's own, which runs inside of :func:`hp_tp.loss_parallel`.
            Without gradients (``generate``, evaluation) they are whole.

    Results may be nested in tuples and dicts. Its own parameters become DTensors Replicate. Communication: for a result that is
    cut one all-gather, in backward none.
    """

    def __init__(
        self,
        *,
        arguments: Sequence[str] | None = None,
        layouts: Placement | None = None,
        cut_logits: bool = False,
    ) -> None:
        self.arguments = None if arguments is None else tuple(arguments)
        self.layouts, self.cut_logits = layouts, cut_logits

    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """The model's forward between its doors."""
        entrance = None
        if self.layouts is not None:
            entrance = BehindDoor(mesh, self.layouts, argument_places(module, self.arguments))
        return WholeModel(mesh, entrance, self.cut_logits)


@dataclass(frozen=True)
class WholeModel:
    """The forward of a model between plain tensors."""

    mesh: Any
    entrance: BehindDoor | None
    cut_logits: bool

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.entrance is not None:
            args, kwargs = self.entrance.brought(args, kwargs)
        if not self.cut_logits:
            return map_leaves(self._whole, own(*args, **kwargs))
        _check_router_loss(module, kwargs)
        with loss_parallel(strict=False):
            return map_leaves(self._whole, own(*args, **kwargs))

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        if self.mesh.shape[0] == 1:
            return Collectives()
        given = Collectives() if self.entrance is None else self.entrance.collectives(module)
        but = ", but for logits with a gradient" if self.cut_logits else ""
        return given.and_then(Collectives((Transfer("all_gather", f"results that are cut{but}"),)))

    def _whole(self, x: Any) -> Any:
        if not is_dtensor(x):
            return x
        platform = get_platform()
        is_cut = isinstance(x.placements[0], Shard) and x.placements[0].dim == len(x.shape) - 1 > 0
        if self.cut_logits and is_cut and platform.is_grad_enabled() and x.requires_grad:
            return x
        return x.full_tensor()


def _check_router_loss(module: Module, kwargs: dict[str, Any]) -> None:
    """ValueError where the model will add a loss of its routers, which is plain, to a loss of cut logits, which is none."""
    asked = kwargs.get("output_router_logits") and kwargs.get("labels") is not None
    if asked and get_platform().is_grad_enabled():
        raise ValueError(
            f"PrepareModel of {type(module).__name__}: with labels and output_router_logits=True the model adds a loss of its routers to "
            f"that of logits that this plan keeps cut. Set config.output_router_logits = True before plan_for, or say "
            f"plan_for(loss_parallel=False): logits are whole then. Or call without labels, and add outputs.aux_loss to a loss of "
            f"whole numbers, loss.full_tensor()"
        )


def whole_dtensor(x: Any, mesh: Any) -> Any:
    """A DTensor as it is; a plain tensor, which is equal on all ranks, as a Replicate."""
    return x if is_dtensor(x) else DTensor.from_local(x, mesh, [Replicate()], shape=tuple(x.shape))


class PrepareMixture(OverridingStyle):
    """Let a mixture of experts see the whole hidden states as a plain tensor, and bring its result back to where they came from.

    Args:
        output_layouts: how the first result (whole and plain, or a DTensor) shall lie.
        use_local_output: whether it is handed out as a plain tensor.

    Hidden states, the first argument, may be a DTensor or a plain tensor, which is taken to be whole. Inside, every rank routes every
    token alike. Communication per call: of hidden states that are cut along the sequence one all-gather, of a result that is a sum
    still one reduce-scatter; in backward one all-gather of the result's gradient.
    """

    def __init__(self, *, output_layouts: Placement, use_local_output: bool) -> None:
        self.output_layouts, self.use_local_output = output_layouts, use_local_output

    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """The mixture's forward between its doors."""
        return BetweenDoors(mesh, self.output_layouts, self.use_local_output)


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

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        if self.mesh.shape[0] == 1 or self.wanted.is_replicate():
            return Collectives()
        return Collectives(
            (
                Transfer("all_gather", "an input that is cut"),
                Transfer("reduce_scatter", "a result that is a sum still"),
            ),
            (Transfer("all_gather", "the result's gradient"),),
        )
