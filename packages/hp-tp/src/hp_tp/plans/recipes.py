"""Which style a part of a model gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_dtensor import Placement, Replicate, Shard
from hp_platform import get_platform
from hp_tp.plans.attention import PrepareAttention
from hp_tp.plans.doors import PrepareHidden, PrepareMixture
from hp_tp.plans.experts import StackedExperts
from hp_tp.plans.parts import Part, Role
from hp_tp.plans.replicated import Replicated
from hp_tp.plans.weights import embedding_weight, parameters_of
from hp_tp.styles.colwise import ColwiseParallel
from hp_tp.styles.rowwise import RowwiseParallel
from hp_tp.styles.sequence import SequenceParallel


@dataclass(frozen=True)
class Recipe:
    """A style by its class and options: equal ones may serve under one pattern."""

    style: type
    options: tuple[tuple[str, Any], ...] = ()
    note: str = ""

    def make(self) -> Any:
        """The style."""
        return self.style(**dict(self.options))


@dataclass(frozen=True)
class Choices:
    """What the user of a plan decides."""

    stream: Placement
    """How the hidden states between blocks lie: Replicate(), or cut along the sequence."""
    loss_parallel: bool
    replicate_kv: bool
    overlap: Any
    """As styles take it."""
    has_router_loss: bool
    """Whether the model adds a loss of its routers, a plain tensor, to that of the logits."""
    has_own_parameters: bool = False
    """Whether the model itself, at the root, owns parameters, such as a table of positions: they are DTensors to its code."""

    @property
    def cuts_logits(self) -> bool:
        """Whether the head's results stay cut."""
        return self.loss_parallel and not self.has_router_loss

    @property
    def is_cut(self) -> bool:
        """Whether the residual stream is cut along the sequence."""
        return isinstance(self.stream, Shard)

    @property
    def on_dtensors(self) -> bool:
        """Whether the residual stream consists of DTensors: so that models read whole lengths from it, or since their parameters meet it."""
        return self.is_cut or self.has_own_parameters


def recipe_for(part: Part, choices: Choices) -> Recipe | None:
    """The style of a part; None for a part that needs none."""
    stream = choices.stream if part.in_stream else Replicate()
    role, note = part.role, part.role.value
    if role is Role.ATTENTION and part.is_local and part.heads and part.kv_heads:
        return _made(PrepareAttention, note, heads=part.heads, kv_heads=part.kv_heads)
    if role in (Role.ATTENTION, Role.FEED_FORWARD):
        return _made(Replicated, f"{note}: {part.reason}") if parameters_of(part.module) else None
    if role is Role.EMBEDDING:
        return _made(RowwiseParallel, note, input_layouts=Replicate(), **_leaving(part, choices))
    if role is Role.HEAD:
        options: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False}
        if not choices.cuts_logits:
            options = {"output_layouts": Replicate(), "use_local_output": not choices.has_own_parameters}
            if choices.loss_parallel:
                note = f"{note}; logits whole, since the model adds a loss of its router to theirs"
        options.update(_overlapping(part, stream, choices))
        return _made(ColwiseParallel, note, input_layouts=stream, **options)
    if role in (Role.QUERY, Role.KEY_VALUE, Role.WIDEN, Role.QKV, Role.WIDEN_PAIR):
        counted: dict[str, Any] = {} if part.heads is None else {"heads": part.heads}
        if role is Role.KEY_VALUE and choices.replicate_kv:
            # Rules of DTensors bring heads that do not divide to every rank, so nothing needs to be counted there.
            shared = {**counted, "query_heads": part.query_heads, "replicate_kv": True}
            counted = shared if part.is_local else {}
        return _made(
            ColwiseParallel,
            f"{note}; on DTensors: {part.reason}" if part.reason else note,
            input_layouts=stream,
            output_layouts=Shard(-1),
            use_local_output=part.is_local,
            **counted,
            **_overlapping(part, stream, choices),
        )
    if role in (Role.ATTENTION_OUT, Role.NARROW):
        counted = {} if part.heads is None else {"heads": part.heads}
        options = {**_leaving(part, choices), **counted, **_overlapping(part, stream, choices)}
        return _made(RowwiseParallel, note, input_layouts=Shard(-1), **options)
    if role is Role.HEAD_NORM:
        return _made(SequenceParallel, note, sequence_dim=2, use_local_output=True, local=True)
    if role is Role.NORM:
        if isinstance(stream, Shard):
            return _made(
                SequenceParallel,
                note,
                sequence_dim=stream.dim,
                input_layouts=Replicate(),
                **_norm_options(part),
            )
        return _made(Replicated, note)
    if role is Role.MIXTURE:
        return _made(PrepareMixture, note, **_leaving(part, choices))
    if role is Role.ROUTER:
        return _made(Replicated, note)
    if role is Role.EXPERTS:
        return _made(StackedExperts, note, use_local_output=part.is_local or not choices.is_cut)
    if role is Role.BLOCK:
        return _made(PrepareHidden, note, layouts=stream) if choices.on_dtensors else None
    # What a table of positions gives is added to the stream, and what an unknown part of attention gives to DTensors.
    is_added = choices.on_dtensors and embedding_weight(part.module) is not None
    meets = {"use_local_output": False} if is_added or not part.is_local else {}
    return _made(Replicated, f"replicated: {part.reason}", **meets)


def _made(style: type, note: str, **options: Any) -> Recipe:
    return Recipe(style, tuple(options.items()), note)


def _leaving(part: Part, choices: Choices) -> dict[str, Any]:
    """Into the stream; inside of a mixture, whole and plain."""
    if not part.in_stream:
        return {"output_layouts": Replicate(), "use_local_output": True}
    return {"output_layouts": choices.stream, "use_local_output": not choices.on_dtensors}


def _overlapping(part: Part, stream: Placement, choices: Choices) -> dict[str, Any]:
    platform = get_platform()
    is_stock = platform.layer_kind(part.module) == "linear" and platform.has_stock_forward(part.module)
    return {"overlap": choices.overlap} if choices.overlap and isinstance(stream, Shard) and is_stock else {}


def _norm_options(part: Part) -> dict[str, Any]:
    """Norms of their own classes run on pieces, too, if they are of the kinds that look at one place of the sequence alone."""
    if get_platform().layer_kind(part.module) is not None:
        return {}
    kind = type(part.module).__name__.lower()
    return {"local": True} if "rmsnorm" in kind or "layernorm" in kind else {}
