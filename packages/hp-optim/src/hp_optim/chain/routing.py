"""Which parameter of a model goes to which optimizer, and why.

Muon is for matrices in the hidden layers: its update has singular values near one, which suits a map between activations. A
table of embeddings is looked up row by row, the head is trained against one row per class, and vectors have no singular
values: these go to AdamW. Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025
(arXiv 2502.16982).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hp_optim.chain.table import table_of
from hp_platform.platform import Platform, get_platform

ADAMW: Final = "adamw"
MUON: Final = "muon"
KINDS: Final = (ADAMW, MUON)
"""In the order in which a chain steps them."""

_EMBEDDINGS: Final = frozenset({"embed", "embeds", "embedding", "embeddings", "emb", "wte", "wpe"})
"""Words in the names of tables that are looked up."""
_HEADS: Final = frozenset(
    {
        "head",
        "heads",
        "output",
        "output_layer",
        "classifier",
        "score",
        "logits",
        "unembed",
        "unembedding",
        "embed_out",
    }
)
"""Names of modules and parameters that give the logits, where they stand outside of numbered layers."""


@dataclass(frozen=True)
class Route:
    """Where one parameter goes."""

    name: str
    """The first of its names in the model, without what wrappers put in."""
    shape: tuple[int, ...]
    """Of the whole."""
    placements: str
    """How it is cut, by mesh dims: ``dp: Shard(0)``; empty for a plain tensor."""
    optimizer: str
    """``"adamw"`` or ``"muon"``; empty for a frozen parameter, which no optimizer gets."""
    why: str


@dataclass(frozen=True)
class Routing:
    """What :func:`route_parameters` has decided, in the order of the model. ``str()`` gives it as a table."""

    routes: tuple[Route, ...]

    def names(self, optimizer: str) -> list[str]:
        """Of all parameters that ``"adamw"`` or ``"muon"`` gets."""
        return [route.name for route in self.routes if route.optimizer == optimizer]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    def __str__(self) -> str:
        return table_of(self.routes)


def route_parameters(model: Any, patterns: Mapping[str, str] | None = None) -> Routing:
    """Say for every parameter of ``model`` whether AdamW or Muon shall update it.

    Args:
        model: a module, before or after ``fully_shard``, ``parallelize_module`` and compilation: whole shapes count, and names
            without what wrappers put in.
        patterns: full names of parameters, or patterns with ``*``, ``?`` and ``[...]``, to ``"adamw"`` or ``"muon"``, such as
            ``{"*.router.weight": "adamw"}``. The first one that meets a name decides; they go before the rule.

    The rule, first line that holds:

    1. frozen (``requires_grad`` is False): no optimizer;
    2. fewer than two dims that are larger than one (vectors, scalars, weights of norms): AdamW;
    3. an embedding, which is a stock embedding layer's parameter or has a word like ``embed``, ``embeddings``, ``wte`` in its name: AdamW.
       A tied head is the same parameter, under another name;
    4. the head, which is called like ``head``, ``output``, ``score`` and stands outside of numbered layers, or has ``lm_head`` in its
       name: AdamW;
    5. all others, which are matrices, experts ``(E, rows, columns)`` and kernels of convolutions: Muon.

    Communication: none; the same on all ranks. TypeError for what is no module; ValueError for a pattern that meets no parameter,
    for an optimizer of another name, and for a pattern that gives Muon a vector.
    """
    platform = get_platform()
    if not platform.is_module(model):
        raise TypeError(f"the routing is made for a module, got a {type(model).__name__}: give the model")
    names = names_of(platform, model)
    chosen = _chosen(names, {} if patterns is None else patterns)
    kinds = _layer_kinds(platform, model)
    routes = []
    for parameter, its_names in names.values():
        optimizer, why = _decided(parameter, its_names, kinds, chosen.get(its_names[0]))
        shape = tuple(parameter.shape)
        routes.append(Route(its_names[0], shape, placements_of(parameter), optimizer, why))
    return Routing(tuple(routes))


def show_routing(model: Any, patterns: Mapping[str, str] | None = None) -> str:
    """The table of :func:`route_parameters`: parameter, number, shape, placements, optimizer, why.

    Parameters of numbered layers that go the same way stand in one row, ``*`` in the place of the number. Arguments, errors and
    communication as there.
    """
    return str(route_parameters(model, patterns))


def names_of(platform: Platform, model: Any) -> dict[int, tuple[Any, list[str]]]:
    """By the id of a parameter: it, and all of its names, the first one first."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, parameter in platform.named_parameters(model, remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(platform.unwrapped_name(name))
    return found


def placements_of(parameter: Any) -> str:
    """``dp: Shard(0), tp: Replicate()``; empty for a plain tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ""
    dims = mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    return ", ".join(
        f"{dim}: {placement!r}" for dim, placement in zip(dims, parameter.placements, strict=True)
    )


def _chosen(
    names: Mapping[int, tuple[Any, list[str]]], patterns: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """By the first name of a parameter: what a pattern says of it, and the pattern."""
    if not isinstance(patterns, Mapping):
        raise ValueError(
            f"patterns are a dict from names of parameters to {_either()}, got a {type(patterns).__name__}"
        )
    found: dict[str, tuple[str, str]] = {}
    known = [name for _, its_names in names.values() for name in its_names]
    for pattern, optimizer in patterns.items():
        if optimizer not in KINDS:
            raise ValueError(f"patterns[{pattern!r}] is {optimizer!r}; expected {_either()}")
        met = [its for _, its in names.values() if any(fnmatch.fnmatchcase(name, pattern) for name in its)]
        if not met:
            near = difflib.get_close_matches(pattern, known, 3, 0.4)
            raise ValueError(
                f"patterns[{pattern!r}] meets no parameter of the model; close names: {', '.join(near) or 'none'}: write the full name, "
                "with * where anything may stand"
            )
        for its_names in met:
            found.setdefault(its_names[0], (optimizer, pattern))
    return found


def _either() -> str:
    return " or ".join(map(repr, KINDS))


def _layer_kinds(platform: Platform, model: Any) -> dict[str, str]:
    """By the full name of a module: what a stock layer computes."""
    kinds = ((name, platform.layer_kind(module)) for name, module in platform.named_modules(model))
    return {platform.unwrapped_name(name): kind for name, kind in kinds if kind is not None}


def _decided(
    parameter: Any, names: list[str], kinds: Mapping[str, str], chosen: tuple[str, str] | None
) -> tuple[str, str]:
    """The optimizer and the reason."""
    shape = tuple(parameter.shape)
    long_dims = sum(size > 1 for size in shape)
    if not parameter.requires_grad:
        return "", "frozen"
    if chosen is not None:
        optimizer, pattern = chosen
        if optimizer == MUON and len(shape) < 2:
            raise ValueError(
                f"patterns[{pattern!r}] gives Muon {names[0]!r} of shape {shape}, which is no matrix: Muon takes parameters with two dims "
                "or more; let the pattern leave it out"
            )
        return optimizer, f"pattern {pattern}"
    if len(shape) < 2:
        return ADAMW, "scalar" if not shape else "vector"
    embedding = next((name for name in names if _is_embedding(name, kinds)), None)
    if embedding is not None:
        return ADAMW, "embedding" if len(names) == 1 else f"embedding, tied to {_other(names, embedding)}"
    if any(map(_is_head, names)):
        return ADAMW, "head"
    if long_dims < 2:
        return ADAMW, "one dim only is larger than 1"
    if any(kinds.get(name.rpartition(".")[0]) == "convolution" for name in names):
        return MUON, "convolution"
    if len(shape) == 2:
        return MUON, "matrix"
    return MUON, f"{shape[0]} matrices" if len(shape) == 3 else "kernel"


def _other(names: list[str], name: str) -> str:
    return ", ".join(other for other in names if other != name)


def _is_embedding(name: str, kinds: Mapping[str, str]) -> bool:
    if kinds.get(name.rpartition(".")[0]) == "embedding":
        return True
    # The module and the one around it: patch_embed.proj.weight is one, embedding_model.layers.0.up.weight is not.
    words = {word for part in name.lower().split(".")[-3:] for word in part.split("_")}
    return not _EMBEDDINGS.isdisjoint(words)


def _is_head(name: str) -> bool:
    parts = name.lower().split(".")
    if "lm_head" in parts:
        return True
    return not _HEADS.isdisjoint(parts) and not any(part.isdigit() for part in parts)
