"""What a module of a transformer may be, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

Module = Any


class Role(Enum):
    """What a part does in a transformer."""

    EMBEDDING = "embedding"
    BLOCK = "layer"
    NORM = "norm"
    ATTENTION = "attention"
    QUERY = "query"
    KEY_VALUE = "key or value"
    QKV = "fused query, key and value"
    HEAD_NORM = "norm of every head"
    ATTENTION_OUT = "attention's output"
    FEED_FORWARD = "feed-forward"
    WIDEN = "to the inner size"
    WIDEN_PAIR = "fused gate and up"
    NARROW = "back from the inner size"
    MIXTURE = "mixture of experts"
    ROUTER = "router"
    EXPERTS = "stacked experts"
    HEAD = "head"
    OTHER = "other"


@dataclass(frozen=True)
class Part:
    """One module of the tree and what it is."""

    name: str
    module: Module
    role: Role
    reason: str = ""
    """Of :attr:`Role.OTHER`: why it has no place. Of attention, feed-forward layers and their first projections: why not local."""
    heads: int | None = None
    """Of projections in attention: heads among the output features (QUERY, KEY_VALUE) or input features (ATTENTION_OUT). Of
    attention: of the queries."""
    query_heads: int | None = None
    """Of KEY_VALUE: heads of the queries beside them."""
    kv_heads: int | None = None
    """Of attention: heads of keys and values."""
    is_local: bool = True
    """Of attention and feed-forward layers and what is in them: whether their code may run on this rank's heads and columns as
    plain tensors; else it must see the whole shapes, as DTensors have them. Of OTHER and EXPERTS: whether what it
    gives is a plain tensor."""
    in_stream: bool = True
    """Whether it reads the residual stream, and not what a mixture has already gathered."""
