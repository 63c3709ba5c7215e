"""A nested state as a flat list of names, and back, without loss.

A name is the path to a leaf, its parts joined by ``/``: ``model/layers.0.weight``. Dots stay as they are, because names of
modules are made of them. Inside of a part ``~`` is written ``~0`` and ``/`` is written ``~1`` (as in JSON Pointer, RFC 6901); a
key that is a number, such as an optimizer's ``{0: ...}``, is ``~i0``; a place in a list is its number, and the kind of the
container says that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DICT, LIST, TUPLE = "dict", "list", "tuple"


class Leaf(NamedTuple):
    """A tensor or a value, and where it stands, so that another value can be put there."""

    value: Any
    holder: Any
    key: Any
    is_tensor: bool


@dataclass
class FlatState:
    """A nested state, flat."""

    root: str
    """Kind of the outermost container."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Kinds of lists and tuples, and of dicts that are empty; every other container is a dict."""


def flatten(state: Any, is_tensor: Callable[[Any], bool]) -> FlatState:
    """All leaves of nested dicts, lists and tuples. ValueError, with the name, for what cannot be kept without loss."""
    if is_tensor(state) or not isinstance(state, (Mapping, list, tuple)):
        raise ValueError(
            f"a state is a dict or a list of tensors, numbers, strings, None and further dicts and lists; got a "
            f"{type(state).__name__}: put it into a dict, {{'name': it}}"
        )
    flat = FlatState(_kind(state))
    _walk(state, (), flat, is_tensor)
    return flat


def _walk(container: Any, path: tuple[str, ...], flat: FlatState, is_tensor: Callable[[Any], bool]) -> None:
    keyed = isinstance(container, Mapping)
    for key, value in container.items() if keyed else enumerate(container):
        here = (*path, _part(key, path) if keyed else str(key))
        name = "/".join(here)
        if is_tensor(value):
            flat.leaves[name] = Leaf(value, container, key, True)
        elif isinstance(value, (Mapping, list, tuple)):
            if not value or not isinstance(value, Mapping):
                flat.kinds[name] = _kind(value)
            _walk(value, here, flat, is_tensor)
        elif value is None or isinstance(value, (bool, int, float, str)):
            flat.leaves[name] = Leaf(value, container, key, False)
        else:
            raise ValueError(
                f"{name} is a {type(value).__name__}; a checkpoint holds tensors, bool, int, float, str, None, and dicts and "
                f"lists of them: convert it, or leave it out"
            )


def rebuild(root: str, kinds: Mapping[str, str], leaves: Mapping[str, Any]) -> Any:
    """The nested state of what :func:`flatten` gave; leaves by their names, in order."""
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        *outer, last = name.split("/")
        _node(tree, outer)[last] = value
    for name in kinds:  # some hold nothing
        _node(tree, name.split("/"))
    return _built(tree, root, "", kinds)


def _node(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for part in path:
        tree = tree.setdefault(part, {})
    return tree


def _built(node: Any, kind: str, prefix: str, kinds: Mapping[str, str]) -> Any:
    children: dict[str, Any] = {
        part: _built(child, kinds.get(prefix + part, DICT), f"{prefix}{part}/", kinds)
        if isinstance(child, dict)
        else child
        for part, child in node.items()
    }
    if kind == DICT:
        return {_key(part): child for part, child in children.items()}
    ordered = [children[str(index)] for index in range(len(children))]
    return ordered if kind == LIST else tuple(ordered)


def _kind(container: Any) -> str:
    return DICT if isinstance(container, Mapping) else TUPLE if isinstance(container, tuple) else LIST


def _part(key: Any, path: tuple[str, ...]) -> str:
    if isinstance(key, str):
        return key.replace("~", "~0").replace("/", "~1")
    if isinstance(key, int) and not isinstance(key, bool):
        return f"~i{key}"
    inside = "/".join(path) or "the state"
    raise ValueError(f"{inside} has the key {key!r}; keys of a checkpoint are strings or whole numbers")


def _key(part: str) -> str | int:
    return int(part[2:]) if part.startswith("~i") else part.replace("~1", "/").replace("~0", "~")
