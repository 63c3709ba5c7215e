"""``StackedExperts``: experts whose weights stand in one module, each cut as a feed-forward layer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor, Partial, Placement, Shard, conversions
from hp_dtensor.chunk import chunk_sizes
from hp_platform import get_platform
from hp_tp.plans.overriding import OverridingStyle
from hp_tp.plans.replicated import own_pieces
from hp_tp.plans.weights import parameters_of
from hp_tp.styles.collectives import Collectives, Transfer
from hp_tp.styles.cutting import check_flag
from hp_tp.styles.placing import check_unplaced, place, run_with

Tensor = Any
Module = Any

PAIR = "gate_up_proj"
CUT_DIMS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2, "w1": 1, "w3": 1, "w2": 2, PAIR: 2}
"""Where the inner size of the experts is in ``(experts, out, in)``, and in the pair ``(experts, 2, inner, hidden)``."""

GROUPED_NBYTES = 16
"""Of which rows of grouped products must be multiples."""


class StackedExperts(OverridingStyle):
    """Cut every expert of a module that holds them all, over its inner size.

    The module has parameters ``(experts, out, in)``: ``gate_proj``, ``up_proj`` and ``down_proj``, or ``w1``, ``w3`` and ``w2``, or
    ``down_proj`` and ``gate_up_proj (experts, 2 inner, hidden)``, the gate's rows first. Its forward gets whole tokens and routes as
    plain tensors, equal on all ranks, computes with this rank's pieces, and the results are summed.

    [Note: the pair] Every rank needs its rows of either half of ``gate_up_proj``, which is no chunk of it. So the parameter
    becomes a DTensor ``(experts, 2, inner, hidden)``, Shard(2), under its old name; forward sees ``(experts, 2 inner / ranks,
    hidden)``. For a state dict in the old shape: ``full_tensor().flatten(1, 2)``.

    [Note: grouped products] Models of transformers compute all experts at once by ``grouped_mm`` unless they are told otherwise. That
    kernel takes rows of multiples of 16 bytes, so every rank's part of the inner size must be one (8 elements of bfloat16, 4 of
    float32), and no rank may be without a part. Other ways (``experts_implementation="eager"`` or ``"batched_mm"``) take any size.

    Args:
        use_local_output: whether the results are summed at once, and handed out as a plain tensor (default); or handed out as a
            DTensor that is a sum still, so that who wants a part of it gets that by a reduce-scatter.

    Communication per call: one all-reduce of the result, or none; in backward one all-reduce of the gradient of every argument
    that has one. ValueError for a module with other parameters, and for an inner size whose parts its kernel does not take.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = check_flag(use_local_output, "StackedExperts: use_local_output")

    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """The experts' forward on this rank's pieces."""
        check_unplaced(module, "StackedExperts")
        own, kind = parameters_of(module), type(module).__name__
        if not own:
            raise ValueError(f"StackedExperts cuts parameters, but this {kind} has none of its own")
        for name, parameter in own.items():
            if name not in CUT_DIMS or len(parameter.shape) != 3 or (name == PAIR and parameter.shape[1] % 2):
                raise ValueError(
                    f"StackedExperts takes parameters (experts, out, in) named {', '.join(CUT_DIMS)}, but this {kind} has "
                    f"{name!r} of shape {tuple(parameter.shape)}: cut it by a style of its own"
                )
        _check_kernel(module, own, mesh.shape[0])
        return SummedExperts(mesh, self.use_local_output)

    def lays_out(self, module: Module) -> list[Module]:
        """The modules whose parameters become DTensors."""
        return [module]

    def place(self, module: Module, mesh: Any) -> None:
        """Cut the weights."""
        own = parameters_of(module)
        if PAIR in own:
            self._split_pair(module, own[PAIR])
        cuts: dict[str, Placement] = {name: Shard(CUT_DIMS[name]) for name in own}
        place(module, mesh, cuts, self.src_data_rank)

    def _split_pair(self, module: Module, pair: Any) -> None:
        platform: Any = get_platform()
        experts, rows, hidden = pair.shape
        halves = platform.reshape(platform.detach(pair), (experts, 2, rows // 2, hidden))
        is_trained = platform.requires_grad(pair)
        platform.set_parameter(module, PAIR, platform.parameter(halves, requires_grad=is_trained))


def _check_kernel(module: Module, own: Mapping[str, Any], num_ranks: int) -> None:
    """ValueError where the module's forward will be grouped products that do not take the parts. See [Note: grouped products]."""
    way = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if way != "grouped_mm":
        return
    for name, parameter in own.items():
        inner = parameter.shape[1] // 2 if name == PAIR else parameter.shape[CUT_DIMS[name]]
        itemsize = get_platform().itemsize(parameter.dtype)
        sizes = chunk_sizes(inner, num_ranks)
        if any(size == 0 or size * itemsize % GROUPED_NBYTES for size in sizes):
            raise ValueError(
                f"StackedExperts: the inner size {inner} of this {type(module).__name__} is cut over {num_ranks} ranks into "
                f"{', '.join(map(str, sizes))}, but grouped_mm takes multiples of {GROUPED_NBYTES // itemsize} elements of "
                f"{itemsize} bytes: let the model compute its experts another way, "
                f'model.set_experts_implementation("batched_mm") or ("eager"), or take a number of ranks that fits'
            )


@dataclass(frozen=True)
class SummedExperts:
    """The forward of experts of which this rank has a part."""

    mesh: Any
    use_local: bool

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        pieces = own_pieces(module)
        if PAIR in pieces:
            experts, _, inner, hidden = pieces[PAIR].shape
            pieces[PAIR] = get_platform().reshape(pieces[PAIR], (experts, 2 * inner, hidden))
        args = tuple(map(self._entered, args))
        kwargs = {name: self._entered(x) for name, x in kwargs.items()}
        y = run_with(module, pieces, own, args, kwargs)
        if not self.use_local:
            return DTensor.from_local(y, self.mesh, [Partial()], shape=tuple(y.shape))
        return y if self.mesh.shape[0] == 1 else conversions.all_reduce(y, self.mesh.get_group(0))

    def _entered(self, x: Any) -> Any:
        """Hidden states, and the weights of routes: every rank has a summand of their gradients."""
        platform = get_platform()
        if self.mesh.shape[0] == 1 or not platform.is_tensor(x):
            return x
        is_recorded = platform.requires_grad(x) and platform.is_grad_enabled()
        return conversions.mark(x, (self.mesh.get_group(0),)) if is_recorded else x

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        if self.mesh.shape[0] == 1:
            return Collectives()
        there = (Transfer("all_reduce", "the result"),) if self.use_local else ()
        back = tuple(Transfer("all_reduce", f"the gradient of {what}") for what in ("tokens", "routes"))
        return Collectives(there, back)
