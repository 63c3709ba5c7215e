"""Deferred parameters get memory for this rank's piece, and the values that their modules give them.

[Note: who initialises] A tensor is initialised by ``reset_parameters`` (or ``_reset_parameters``) of the module that owns it, or
of the nearest one above that has such a method. Those methods run in the order in which modules are built, children before
their parents, each once, on DTensors and plain tensors alike, with draws of :mod:`hp_dtensor.random`: so the values are those
of the same call on the unsharded model. What was no deferred tensor keeps its values, and so does a shared tensor that another
module has initialised; a parent may change what its children have set.

On MindSpore most stock cells have no such method: a parameter that its cell made by an initializer gets the draws of that
initializer, in the cell's turn and before its method if it has one. Functions that are given for single tensors run last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.init.contexts import adapter
from hp_dtensor.init.in_parts import as_wholes, in_parts, whole_name
from hp_dtensor.module_tensors import suggestion
from hp_platform import RandomStream, default_random_stream, get_platform

Module = Any


@dataclass
class _Tensor:
    """A parameter or buffer, by all its places."""

    value: Any
    names: list[str] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    is_deferred: bool = False
    by: str | None = None
    """Path of the module that has initialised it."""
    given: Callable[[Any], object] | None = None
    """The user's function for it."""


def init_parameters(
    module: Module,
    stage_index: int = 0,
    *,
    device: str | None = None,
    initializers: Mapping[str, Callable[[Any], object]] | None = None,
) -> Module:
    """Give every deferred (meta) parameter and buffer its memory and its initial values. Returns ``module``.

    A DTensor gets memory for this rank's piece only: no full-size tensor is made at any time. The values are those of the
    same call on the unsharded model, for any sharding and number of ranks; see [Note: who initialises]. Tensors keep their
    identity, so shared weights stay shared and optimizers that know them still do.

    Args:
        module: built under :func:`init_empty_weights`, or on meta otherwise; sharded since, or not.
        stage_index: of a pipeline stage, 0 or more: added to the seed, so that stages differ.
        device: for plain tensors; default: that of the meshes of its DTensors, else the framework's default one.
        initializers: full name of a deferred parameter or buffer -> a function that writes its values in place, with
            :mod:`hp_dtensor.random` for instance (``lambda x: random.normal_(x, 0.0, 0.02)``). It gets a DTensor if the
            tensor is one. For tensors that no module initialises, or otherwise.

    All ranks call. No communication, but for parameters that a style keeps in parts (fused projections): what was drawn of them is
    exchanged, see [Note: initialised as a whole] in :mod:`hp_dtensor.init.in_parts`. ValueError for a wrong ``stage_index``, and
    for names in ``initializers`` that no deferred tensor has. RuntimeError with the names of the tensors that nobody initialises:
    then nothing was changed; or that were left out. NotImplementedError for an initializer of MindSpore that is not drawn in
    pieces, by name.
    """
    platform = get_platform()
    if isinstance(stage_index, bool) or not isinstance(stage_index, int) or stage_index < 0:
        raise ValueError(f"stage_index counts pipeline stages from 0, got {stage_index!r}")
    modules = dict(platform.named_modules(module))
    tensors = _tensors(modules)
    deferred = [tensor for tensor in tensors if tensor.is_deferred]
    _take_given(initializers or {}, deferred)
    initialisers = {
        id(t): [_initialiser(place, modules) for place in zip(t.owners, t.names, strict=True)]
        for t in deferred
        if t.given is None
    }
    orphans = [t.names[0] for t in deferred if not any(p is not None for p in initialisers.get(id(t), [""]))]
    if orphans:
        raise RuntimeError(
            f"nobody initialises {', '.join(orphans)}: neither the module that owns it nor one above has reset_parameters(). "
            f"Define it, or give init_parameters(initializers={{name: function}}) a function for each"
        )
    if not deferred:
        return module
    make = adapter()
    where = device or make.device_of_meshes([t.value for t in tensors])
    for tensor in deferred:
        make.materialise(tensor.value, where)
    wanted = {path for paths in initialisers.values() for path in paths if path is not None}
    with platform.no_grad(), _stage(stage_index), make.draws():
        for path in _children_first(modules):
            if path in wanted:
                _run(path, modules[path], tensors)
        for tensor in deferred:
            if tensor.given is not None:
                tensor.given(tensor.value)
    left_out = [t.names[0] for t in deferred if not make.is_written(t.value)]
    if left_out:
        raise RuntimeError(
            f"reset_parameters() of the modules that own {', '.join(left_out)}, or the function given, has left them without "
            f"values: set them there"
        )
    return module


def _tensors(modules: dict[str, Module]) -> list[_Tensor]:
    """Every parameter and buffer once, in the order of the modules."""
    platform, make = get_platform(), adapter()
    found: dict[int, _Tensor] = {}
    for path, owner in modules.items():
        own = (
            *platform.named_parameters(owner, recurse=False, remove_duplicate=False),
            *platform.named_buffers(owner, recurse=False),
        )
        for name, value in own:
            tensor = found.setdefault(id(value), _Tensor(value, is_deferred=make.is_deferred(value)))
            tensor.names.append(f"{path}.{name}" if path else name)
            tensor.owners.append(path)
    return list(found.values())


def _take_given(given: Mapping[str, Callable[[Any], object]], deferred: list[_Tensor]) -> None:
    """Functions of the user go to the tensors that they name."""
    known = {name: tensor for tensor in deferred for name in tensor.names}
    for name, function in given.items():
        if name not in known:
            raise ValueError(
                f"initializers[{name!r}]: there is no deferred tensor of this name; {suggestion(name, known)}"
            )
        if not callable(function):
            raise ValueError(
                f"initializers[{name!r}] must be a function that writes the tensor, got {function!r}"
            )
        known[name].given = function


def _initialiser(place: tuple[str, str], modules: dict[str, Module]) -> str | None:
    """Path of the module that initialises the tensor at ``place`` (path of its owner, full name); None: nobody does."""
    path: str | None = place[0]
    attribute: str | None = whole_name(modules[place[0]], place[1].rpartition(".")[2])
    while path is not None:
        if adapter().initialises(modules[path], attribute):
            return path
        attribute = None
        path = path.rpartition(".")[0] if "." in path else "" if path else None
    return None


def _children_first(modules: dict[str, Module]) -> Iterator[str]:
    """Paths in the order in which the modules were built: siblings in theirs, a parent after its children."""
    children: dict[str, list[str]] = {path: [] for path in modules}
    for path in modules:
        parent = path.rpartition(".")[0]
        while path and parent not in modules:  # a module that stands in two places is walked in one
            parent = parent.rpartition(".")[0]
        if path:
            children[parent].append(path)

    def visit(path: str) -> Iterator[str]:
        for child in children[path]:
            yield from visit(child)
        yield path

    return visit("")


def _run(path: str, module: Module, tensors: list[_Tensor]) -> None:
    """One module's method; values that are not its business are put back."""
    make = adapter()
    own = [t for t in tensors if any(_is_below(owner, path) for owner in t.owners)]
    others = [t for t in own if not t.is_deferred or (t.by is not None and not _is_below(t.by, path))]
    kept = [make.copy_of(t.value) for t in others]
    places = [place for t in own if t.given for place in zip(t.owners, t.names, strict=True)]
    given = {name.rpartition(".")[2] for owner, name in places if owner == path}
    fused = {name for name, parts in in_parts(module).items() if given.issuperset(parts.attributes)}
    with as_wholes(inner for _, inner in get_platform().named_modules(module)):
        make.initialiser_of(module, given | fused)()
    for tensor, values in zip(others, kept, strict=True):
        make.put_back(tensor.value, values)
    for tensor in own:
        if tensor.is_deferred and tensor.by is None and make.is_written(tensor.value):
            tensor.by = path


def _is_below(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(above + ".")


class _stage:  # noqa: N801 (used like a function, as contextmanager would make it)
    """The default stream with the seed of a stage; after it the stream goes on behind what was drawn."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> RandomStream:
        stream = default_random_stream()
        self._seed = stream.seed
        stream.set_state({"seed": stream.seed + self._index, "number": stream.number})
        return stream

    def __exit__(self, *_: object) -> None:
        stream = default_random_stream()
        stream.set_state({"seed": self._seed, "number": stream.number})
