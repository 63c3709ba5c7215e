"""``plan_for``: a plan made from what the parts of a model are called."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping
from typing import Any

from hp_dtensor import Replicate, Shard
from hp_platform import get_platform
from hp_tp.overlap.policy import policy_of
from hp_tp.plans.anatomy import NO_NAME, parts_of
from hp_tp.plans.doors import PrepareHidden, PrepareModel
from hp_tp.plans.heads import configuration_of
from hp_tp.plans.parallel_plan import ParallelPlan
from hp_tp.plans.parts import Part, Role
from hp_tp.plans.recipes import Choices, Recipe, recipe_for
from hp_tp.plans.weights import parameters_of

HIDDEN_ARGUMENTS = ("inputs_embeds",)
"""Arguments of models that hold hidden states in the place of ids."""


def plan_for(
    model: Any,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    replicate_kv: bool = False,
    local_attention: bool | None = None,
    overlap: Any = False,
    sequence_dim: int = 1,
) -> ParallelPlan:
    """A tensor parallel plan for a transformer, to be printed, changed and given to :func:`hp_tp.parallelize_module`::

        plan = plan_for(model)
        print(plan)
        parallelize_module(model, mesh["tp"], plan)

    The model may be one of the transformers library (Llama, Qwen3, Mixtral and what is built like them), or any tree of modules
    with the usual names: ``q_proj``/``k_proj``/``v_proj``/``o_proj``, ``wq``/``wk``/``wv``/``wo``, ``gate``/``up``/``down_proj``,
    ``w1``/``w2``/``w3``, ``fc1``/``fc2``, fused ``qkv``, ``embed_tokens``, ``lm_head``, names with ``norm`` and so on
    (:mod:`hp_tp.plans.names`). Its code stays as it is; it takes and gives whole plain tensors, as before.

    Args:
        model: the model, also on the meta device; it is only looked at.
        sequence_parallel: whether the hidden states between blocks are cut along the sequence, as DTensors, of any length.
        loss_parallel: whether logits stay cut along the classes, as DTensors, while gradients are recorded. Without gradients
            (``generate``, evaluation) the model gives them whole in any case; and where it adds a loss of its routers to theirs
            (``output_router_logits`` of its configuration; given at a call with labels it is refused).
        replicate_kv: whether every rank computes the keys and values of all heads: for numbers of heads of keys that do not divide over
            the ranks, which are an error otherwise when the plan is applied. Their gradients are summed.
        local_attention: whether the code between the projections of attention runs on plain tensors with this rank's heads (True), or on
            DTensors with all heads (False). None: on plain ones where that is known to be right; see below.
        overlap: for sequence parallel plans: whether layers gather and reduce beside their products where that pays; True, or an
            :class:`hp_tp.OverlapPolicy` (see ``overlap`` of :class:`hp_tp.ColwiseParallel`).
        sequence_dim: the dim of the sequence in hidden states ``(batch, sequence, hidden)``.

    What gets which style:

    * queries, keys, values, gate and up: :class:`hp_tp.ColwiseParallel`; the projections behind: :class:`hp_tp.RowwiseParallel`.
      Where it is known that the code between them does not count heads (models of transformers), it runs on plain tensors
      with this rank's heads, so that every attention kernel and cache works; else, and where there is dropout, on DTensors.
    * norms: :class:`hp_tp.SequenceParallel`; without ``sequence_parallel`` they are computed whole on every rank.
    * embedding and head: cut along the vocabulary, both alike, so that they may share a parameter.
    * mixtures of experts: the router is whole on every rank, every expert is cut as a feed-forward layer is. Stacked experts that
      are multiplied by ``grouped_mm`` need parts of multiples of 16 bytes: see :class:`hp_tp.StackedExperts`.
    * everything else with parameters is whole on every rank; the plan names it, with the reason (``plan.replicated``).

    Communication per block: those of the styles: with ``b`` bytes of hidden states two all-reduces of ``b`` in forward and two in
    backward, or with ``sequence_parallel`` two all-gathers and two reduce-scatters each. ValueError for a model in which
    nothing has a usual name, TypeError for what is no module.
    """
    platform = get_platform()
    if not platform.is_module(model):
        raise TypeError(f"plan_for takes a module, got {type(model).__name__}")
    for name, flag in (
        ("sequence_parallel", sequence_parallel),
        ("loss_parallel", loss_parallel),
        ("replicate_kv", replicate_kv),
    ):
        if not isinstance(flag, bool):
            raise ValueError(f"plan_for: {name} must be True or False, got {flag!r}")
    if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int) or sequence_dim < 0:
        raise ValueError(f"plan_for: sequence_dim must be a dim such as 1, got {sequence_dim!r}")
    if local_attention is not None and not isinstance(local_attention, bool):
        raise ValueError(f"plan_for: local_attention must be True, False or None, got {local_attention!r}")
    if policy_of(overlap, "plan_for") is not None and not sequence_parallel:
        raise ValueError(
            "plan_for: overlap is for sequence_parallel=True, where layers gather and reduce: leave one of them out"
        )
    parts = parts_of(model, local_attention)
    if not any(part.role in (Role.ATTENTION, Role.FEED_FORWARD, Role.EXPERTS) for part in parts):
        raise ValueError(_nothing_found(model, parts))
    choices = Choices(
        Shard(sequence_dim) if sequence_parallel else Replicate(),
        loss_parallel,
        replicate_kv,
        overlap,
        bool(getattr(configuration_of(model), "output_router_logits", False)),
        bool(parameters_of(model)),
    )
    chosen = _chosen(model, parts, choices)
    entries = _patterns(dict(platform.named_modules(model)), chosen)
    return ParallelPlan(
        {pattern: recipe.make() for pattern, recipe in entries.items()},
        {pattern: recipe.note for pattern, recipe in entries.items() if recipe.note},
        {part.name: part.reason for part in parts if part.role is Role.OTHER},
    )


def _nothing_found(model: Any, parts: list[Part]) -> str:
    of_other_kind = next((part for part in parts if part.role is Role.OTHER and part.reason != NO_NAME), None)
    hint = "" if of_other_kind is None else f"; {of_other_kind.name!r}: {of_other_kind.reason}"
    return (
        f"plan_for finds no attention and no feed-forward layer in this {type(model).__name__}: it goes by names such as q_proj, "
        f"k_proj, v_proj and o_proj, or up_proj and down_proj beside each other{hint}. Write the plan by hand, {{pattern: style}}"
    )


def _chosen(model: Any, parts: list[Part], choices: Choices) -> dict[str, Recipe]:
    """The recipe of every module that needs a style, in the order of the tree."""
    chosen: dict[str, Recipe] = {"": _for_model(model, parts, choices)}
    embedding = next((part for part in parts if part.role is Role.EMBEDDING), None)
    owner = "" if embedding is None else embedding.name.rpartition(".")[0]
    named = _hidden_arguments(get_platform().get_submodule(model, owner))
    if owner and named and choices.on_dtensors:
        options = (("arguments", named), ("layouts", choices.stream))
        chosen[owner] = Recipe(PrepareHidden, options, "hidden states given by name")
    for part in parts:
        recipe = recipe_for(part, choices)
        if part.role is Role.OTHER and choices.on_dtensors and _holds_stream(part, parts):
            arguments = named if part.name == owner else ()
            options = (("arguments", arguments), ("layouts", choices.stream))
            recipe = Recipe(PrepareHidden, options, "replicated: it meets the hidden states of its layers")
        if recipe is not None and part.name:
            chosen[part.name] = recipe
    return chosen


def _holds_stream(part: Part, parts: list[Part]) -> bool:
    """Whether other parts, which read the residual stream, are in it: its parameters must be DTensors where that consists of them."""
    return any(
        other.in_stream and other.role is not Role.OTHER and other.name.startswith(f"{part.name}.")
        for other in parts
    )


def _for_model(model: Any, parts: list[Part], choices: Choices) -> Recipe:
    has_head = any(part.role is Role.HEAD for part in parts)
    options: dict[str, Any] = {"cut_logits": has_head and choices.cuts_logits}
    if choices.on_dtensors and all(part.role is not Role.EMBEDDING for part in parts):
        options["layouts"] = choices.stream  # of its first argument
    elif choices.on_dtensors and _hidden_arguments(model):
        options.update(arguments=_hidden_arguments(model), layouts=choices.stream)
    return Recipe(PrepareModel, tuple(options.items()), "the model: whole plain tensors in and out")


def _hidden_arguments(module: Any) -> tuple[str, ...]:
    function = getattr(module, "forward", None) or getattr(module, "construct", None)
    known = inspect.signature(function).parameters if function is not None else {}
    return tuple(name for name in HIDDEN_ARGUMENTS if name in known)


# ---------------------------------------------------------------------------------------------------------------- patterns
def _patterns(modules: Mapping[str, Any], chosen: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes by patterns: modules that differ only in numbers share one, if it meets no other module."""
    groups: dict[tuple[str, Recipe], list[str]] = {}
    for name, recipe in chosen.items():
        groups.setdefault((_starred(name), recipe), []).append(name)
    by_pattern: dict[str, int] = {}
    for pattern, _ in groups:
        by_pattern[pattern] = by_pattern.get(pattern, 0) + 1
    entries: dict[str, Recipe] = {}
    for (pattern, recipe), members in groups.items():
        if by_pattern[pattern] == 1 and _met(pattern, modules) == len(members):
            entries[pattern] = recipe
        else:
            entries.update(dict.fromkeys(members, recipe))
    return entries


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _met(pattern: str, modules: Mapping[str, Any]) -> int:
    """How many modules the pattern meets, level by level."""
    parts = pattern.split(".")
    return sum(
        len(name.split(".")) == len(parts)
        and all(fnmatch.fnmatchcase(own, part) for own, part in zip(name.split("."), parts, strict=True))
        for name in modules
    )
