"""What the parts of a model are: attention, feed-forward layers, mixtures of experts, norms, embedding and head.

Only names, shapes and attributes are read, so models of any library and on any framework are understood alike, and on devices
without memory (meta) too. What is not understood is a part, too: :attr:`hp_tp.plans.parts.Role.OTHER`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hp_platform import get_platform
from hp_tp.plans import names
from hp_tp.plans.heads import Heads, configuration_of, has_own_counts, heads_of
from hp_tp.plans.names import joined, last_part, one_of
from hp_tp.plans.parts import Part, Role
from hp_tp.plans.weights import drops, embedding_weight, is_stack, linear_weight, parameters_of

Module = Any
NO_NAME = "no usual name"
"""Why a module has no place, if only its name does not tell one."""


def parts_of(root: Module, local_attention: bool | None = None) -> list[Part]:
    """Every module of the tree that has parameters or doors, in the order of the tree.

    ``local_attention``: whether attention is local (:attr:`hp_tp.plans.parts.Part.is_local`), if that is known better than names and attributes tell.
    """
    found = list(_Walk(root, local_attention).visit("", in_stream=True))
    # A parameter that stands in several places goes where it has a role, and takes the others along.
    placed = {id(p) for part in found if part.role is not Role.OTHER for p in _own(part)}
    return [
        part for part in found if part.role is not Role.OTHER or any(id(p) not in placed for p in _own(part))
    ]


def _own(part: Part) -> list[Any]:
    return list(parameters_of(part.module).values())


class _Walk:
    def __init__(self, root: Module, local_attention: bool | None) -> None:
        self.root, self.local_attention = root, local_attention
        self.modules: dict[str, Module] = dict(get_platform().named_modules(root))
        self.children: dict[str, dict[str, Module]] = {name: {} for name in self.modules}
        for name, module in self.modules.items():
            if name:
                self.children[name.rpartition(".")[0]][last_part(name)] = module
        embeddings = [module for name, module in self.modules.items() if self._is_embedding(name)]
        self.vocabulary = embedding_weight(embeddings[0]).shape[0] if embeddings else None

    # ------------------------------------------------------------------------------------------------------- the walk
    def visit(self, name: str, *, in_stream: bool) -> Iterator[Part]:
        """The parts of the module ``name`` and below it."""
        children = self.children[name]
        if names.EXPERTS & set(children):
            yield from self._mixture(name, in_stream)
        elif self._projections(children) is not None:
            yield from self._attention(name, in_stream)
        elif self._is_feed_forward(children) and not any(map(self._is_sublayer, self._below_of(name))):
            yield from self._feed_forward(name, in_stream)
        else:
            yield from self._itself(name, in_stream)
            flat = self._inner_projections(children) if self._is_feed_forward(children) else {}
            if in_stream and (flat or any(map(self._is_sublayer, self._below_of(name)))):
                yield Part(name, self.modules[name], Role.BLOCK)
            for child, module in children.items():
                full = joined(name, child)
                if child in flat:
                    reason = "" if flat[child] is Role.NARROW else "beside other parts of its layer"
                    yield Part(full, module, flat[child], reason, is_local=False, in_stream=in_stream)
                else:
                    yield from self.visit(full, in_stream=in_stream)

    def _below_of(self, name: str) -> list[str]:
        return [joined(name, child) for child in self.children[name]]

    def _is_sublayer(self, name: str) -> bool:
        children = self.children[name]
        is_mixture = bool(names.EXPERTS & set(children))
        return is_mixture or self._projections(children) is not None or self._is_feed_forward(children)

    def _itself(self, name: str, in_stream: bool) -> Iterator[Part]:
        """A module that holds parameters itself, by its own name."""
        module, own = self.modules[name], parameters_of(self.modules[name])
        if not own:
            return
        if self._is_embedding(name):
            yield Part(name, module, Role.EMBEDDING)
        elif self._is_head(name):
            yield Part(name, module, Role.HEAD)
        elif names.is_norm(last_part(name)) and all(len(p.shape) <= 1 for p in own.values()):
            yield Part(name, module, Role.NORM, in_stream=in_stream)
        else:
            is_known = last_part(name) in names.PROJECTIONS and linear_weight(module) is None
            reason = f"a {type(module).__name__} is no linear layer" if is_known else NO_NAME
            yield Part(name, module, Role.OTHER, reason, in_stream=in_stream)

    def _rest(self, name: str, known: set[str], in_stream: bool, reason: str) -> Iterator[Part]:
        """What a part holds below it besides the children that are known."""
        for child in self.children[name]:
            if child not in known:
                for inner in self._below(joined(name, child)):
                    module = self.modules[inner]
                    yield Part(inner, module, Role.OTHER, reason, is_local=False, in_stream=in_stream)

    def _below(self, name: str) -> Iterator[str]:
        """The modules with parameters of their own among ``name`` and what is below."""
        if parameters_of(self.modules[name]):
            yield name
        for child in self.children[name]:
            yield from self._below(joined(name, child))

    # ------------------------------------------------------------------------------------------------------ attention
    def _projections(self, children: Mapping[str, Module]) -> dict[str, str] | None:
        """Which children are the projections of an attention module; None if it is none."""
        fused = one_of(children, names.QKV)
        found: dict[str, str | None] = {"qkv": fused}
        if fused is None:
            found = {
                "query": one_of(children, names.QUERY),
                "key": one_of(children, names.KEY),
                "value": one_of(children, names.VALUE),
            }
        found["out"] = one_of(children, names.ATTENTION_OUT)
        if any(child is None or linear_weight(children[child]) is None for child in found.values()):
            return None
        return {what: child for what, child in found.items() if child is not None}

    def _attention(self, name: str, in_stream: bool) -> Iterator[Part]:
        module, children = self.modules[name], self.children[name]
        of = self._projections(children)
        assert of is not None
        rows = {what: linear_weight(children[child]).shape[0] for what, child in of.items()}
        heads = heads_of(module, self.root, rows.get("query"), rows.get("key"), rows.get("qkv"))
        norms = [child for child in children if names.is_norm(child) and child not in of.values()]
        reason = self._why_whole(name, of, heads, norms)
        is_local = not reason
        counted = {} if heads is None else {"heads": heads.queries, "kv_heads": heads.keys}
        yield Part(name, module, Role.ATTENTION, reason, is_local=is_local, in_stream=in_stream, **counted)
        queries, keys = (None, None) if heads is None else (heads.queries, heads.keys)
        roles: dict[str, tuple[Role, int | None, int | None]] = {
            "query": (Role.QUERY, queries, None),
            "key": (Role.KEY_VALUE, keys, queries),
            "value": (Role.KEY_VALUE, keys, queries),
            "qkv": (Role.QKV, None, None),
            "out": (Role.ATTENTION_OUT, queries, None),
        }
        for what, child in of.items():
            role, count, shared_by = roles[what]
            yield Part(
                joined(name, child),
                children[child],
                role,
                reason if what in ("query", "qkv") else "",
                heads=count,
                query_heads=shared_by,
                is_local=is_local,
                in_stream=in_stream,
            )
        known = set(of.values())
        if is_local:
            known.update(norms)
            for child in norms:
                yield Part(joined(name, child), children[child], Role.HEAD_NORM, in_stream=in_stream)
        yield from self._rest(name, known, in_stream, "in attention, on whole shapes")

    def _why_whole(self, name: str, of: dict[str, str], heads: Heads | None, norms: list[str]) -> str:
        """Why the code between the projections must see the whole shapes; empty if this rank's heads do."""
        module, children = self.modules[name], self.children[name]
        configuration = configuration_of(module)
        if self.local_attention is False:
            return "as asked for"
        if heads is None:
            return "its numbers of heads are not known"
        if "qkv" in of:
            return "a fused projection is taken apart by whole sizes"
        if self.local_attention:
            return ""
        if has_own_counts(module) or not getattr(configuration, "base_model_tp_plan", None):
            return "its code may count on the whole number of heads"
        if drops(module, self._descendants(name)):
            return "its dropout must be that of one process"
        if any(tuple(p.shape) != (heads.size,) for c in norms for p in parameters_of(children[c]).values()):
            return "its norms go over more than one head"
        if parameters_of(module) or any(
            any(True for _ in self._below(joined(name, child)))
            for child in children
            if child not in of.values() and child not in norms
        ):
            return "it has parameters without a usual name"
        return ""

    # --------------------------------------------------------------------------------------------------- feed-forward
    def _is_feed_forward(self, children: Mapping[str, Module]) -> bool:
        down = one_of(children, names.DOWN)
        wide = [c for c in children if c in names.GATE | names.UP | names.GATE_UP]
        return (
            down is not None
            and bool(wide)
            and all(linear_weight(children[child]) is not None for child in [down, *wide])
        )

    def _inner_projections(self, children: Mapping[str, Module]) -> dict[str, Role]:
        """What the projections of a feed-forward layer are, in the order of the children."""
        down = one_of(children, names.DOWN)
        return {
            child: Role.NARROW if child == down else Role.WIDEN_PAIR if child in names.GATE_UP else Role.WIDEN
            for child in children
            if child == down or child in names.GATE | names.UP | names.GATE_UP
        }

    def _feed_forward(self, name: str, in_stream: bool) -> Iterator[Part]:
        module, children = self.modules[name], self.children[name]
        roles = self._inner_projections(children)
        known = set(roles)
        reason = ""
        if drops(module, self._descendants(name)):
            reason = "its dropout must be that of one process"
        elif parameters_of(module) or any(True for _ in self._rest(name, known, in_stream, "")):
            reason = "it has parameters without a usual name"
        elif known & names.GATE_UP:
            reason = "a fused projection is taken apart by whole sizes"
        is_local = not reason
        yield Part(name, module, Role.FEED_FORWARD, reason, is_local=is_local, in_stream=in_stream)
        for child, role in roles.items():
            told = "" if role is Role.NARROW else reason
            yield Part(
                joined(name, child), children[child], role, told, is_local=is_local, in_stream=in_stream
            )
        yield from self._rest(name, known, in_stream, "in a feed-forward layer, on whole shapes")

    # ------------------------------------------------------------------------------------------------ mixture of experts
    def _mixture(self, name: str, in_stream: bool) -> Iterator[Part]:
        module, children = self.modules[name], self.children[name]
        yield Part(name, module, Role.MIXTURE, in_stream=in_stream)
        # Beside plain tensors of other parts, what experts give must be plain, too.
        is_alone = not any(
            True
            for child in children
            if child not in names.ROUTER | names.EXPERTS
            for _ in self._below(joined(name, child))
        )
        for child, part in children.items():
            full = joined(name, child)
            if child in names.ROUTER:
                for inner in self._below(full):
                    yield Part(inner, self.modules[inner], Role.ROUTER, in_stream=False)
            elif child in names.EXPERTS and is_stack(part):
                yield Part(full, part, Role.EXPERTS, is_local=not is_alone, in_stream=False)
            else:
                yield from self.visit(full, in_stream=False)

    # ------------------------------------------------------------------------------------------------ embedding and head
    def _is_embedding(self, name: str) -> bool:
        return last_part(name) in names.EMBEDDING and embedding_weight(self.modules[name]) is not None

    def _is_head(self, name: str) -> bool:
        weight = linear_weight(self.modules[name])
        if last_part(name) not in names.HEAD or weight is None:
            return False
        return self.vocabulary is None or weight.shape[0] == self.vocabulary

    def _descendants(self, name: str) -> list[Module]:
        return [m for n, m in self.modules.items() if n.startswith(f"{name}." if name else "") and n]
