"""What is done with a tensor at the doors of several modules is done once, and kept with the tensor.

[Note: kept with the tensor] Three projections of one activation are three modules that get the same tensor. Its gradient is
to be reduced once, and if it is a piece it is to be gathered once. So what the first module's door makes of the tensor
is kept as an attribute of the tensor, for the doors that follow, while nobody has written to it or put other memory under it.
It ends with the backward of what was made (a second forward makes a new one), or with the tensor. In code that is
being compiled, tensors are those of one trace, and end with it.

Doors that get one tensor follow each other. So when something is made of another tensor on the mesh, what was made before is
kept weakly: the graph holds what its backward needs, and a layer that is recomputed does not leave the whole of its input behind.
Of a leaf that requires grad it is kept weakly from the beginning: the graph behind it holds the leaf, and nobody could free such a
cycle.

What was made where no gradient is recorded hands none on, so it is no answer where one is. A forward that is recomputed makes
its own, as the first one did. And what requires a gradient while none is recorded (the input of a layer under reentrant
checkpointing) is itself kept until backward: what is made of it would be, too, so it is not kept at all.

Collectives, ``x.data`` and kernels of other libraries write without being counted. So a module that comes to the same tensor a
second time has what it needs made anew, and the modules that come after it get that: a buffer that is filled for every
call (of a receive, of a batch) is read at every call.

[Note: two keepers] DTensors keep the like themselves (:mod:`hp_dtensor.marks`), and a door asks them where it gets one that is whole.
The two have in common when an answer is right no more (another version, another address), and little else. Marks are
identities along sets of mesh dims, which cost no memory: they may be had by any operation any number of times, with or without
doors, where gradients are recorded. They are what a DTensor's other face (a redistributed tensor's gradient goes back in pieces)
and deferred reductions (of hp_fsdp) are made of, so they need its spec and a slot of its own. Here it is copies that are kept,
of plain tensors, on a mesh of one dim, also without gradients; so it is about how long they live and who has had them, which a mark
needs not know. One mechanism would have both sets of rules, each idle in half of its uses, on the way of every operation of DTensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from hp_platform import get_platform
from hp_tp.styles.door import Door

Tensor = Any
T = TypeVar("T")
_ATTRIBUTE = "_hp_tp_shared"
_LAST = "hp_tp: last that keeps"
"""In ``mesh.interned``: weakly what is kept with the tensor of which something was made last."""


def may_share(x: Tensor) -> bool:
    """Whether a gather of ``x`` may be kept.

    Always where a graph is recorded, which must see no writes; else not where these leave no trace, and not of what lives longer
    than the layers that get it: see [Note: kept with the tensor].
    """
    platform = get_platform()
    if platform.is_compiling() or _records(x):
        return True
    return not platform.requires_grad(x) and platform.counts_writes(x)


def _records(x: Tensor) -> bool:
    platform = get_platform()
    return platform.is_grad_enabled() and platform.requires_grad(x)


class _Made(NamedTuple):
    """What was made of a tensor."""

    reference: Callable[[], Any]
    state: Any
    """Of the tensor then."""
    users: list[Any]
    """The doors that have got it."""


class _Shared:
    """What is kept with one tensor, by key."""

    __slots__ = ("__weakref__", "made")

    def __init__(self) -> None:
        self.made: dict[Any, _Made] = {}

    def keep_weakly(self) -> None:
        """Let what was made live only as long as somebody else needs it."""
        platform = get_platform()
        for key, each in self.made.items():
            if isinstance(each.reference, _Strongly) and platform.is_tensor(each.reference.to):
                self.made[key] = each._replace(reference=weakref.ref(each.reference.to))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Shared, ()  # copies and files of the tensor begin with nothing


def shared(
    x: Tensor,
    door: Door,
    key: tuple[Any, ...],
    make: Callable[[Callable[[], None]], T],
    *,
    is_copy: bool = False,
) -> T:
    """``make(used)``, or what it gave for this key on the door's mesh before. ``used()`` is to be called when its backward begins.

    ``is_copy``: whether what is made is a copy of the values, which a door is to get once only.
    """
    platform = get_platform()
    if platform.is_compiling():
        return _in_trace(x, door, key, make)
    kept: _Shared | None = getattr(x, _ATTRIBUTE, None)
    if kept is None:
        kept = _Shared()
        setattr(x, _ATTRIBUTE, kept)
    key = (door.mesh, *key, _records(x), platform.is_recomputing())
    # As marks: other memory under a tensor is counted by no version; where nothing counts, asking would wait for the device.
    address = platform.data_ptr(x) if platform.supports("version_counter") else None
    state = (platform.version(x), address)
    found = kept.made.get(key)
    if found is not None and found.state == state and not any(each is door for each in found.users):
        known: T | None = found.reference()
        if known is not None:
            if is_copy:
                found.users.append(door)
            return known
    keeper = weakref.ref(kept)

    def used() -> None:
        alive = keeper()
        if alive is not None:
            alive.made.pop(key, None)

    made = make(used)
    is_cycle = platform.is_tensor(made) and platform.requires_grad(x) and platform.is_leaf(x)
    reference = weakref.ref(made) if is_cycle else _Strongly(made)
    kept.made[key] = _Made(reference, state, [door] if is_copy else [])
    last = door.mesh.interned.get(_LAST)
    before = None if last is None else last()
    if before is not None and before is not kept:
        before.keep_weakly()
    door.mesh.interned[_LAST] = keeper
    return made


def _in_trace(x: Tensor, door: Door, key: tuple[Any, ...], make: Callable[[Callable[[], None]], T]) -> T:
    group = "" if door.traced is None else door.traced.name
    attribute = f"_hp_tp_{key[0]}_{key[-1]}_{group}"
    found: T | None = getattr(x, attribute, None)
    if found is None:
        found = make(_nothing)
        setattr(x, attribute, found)
    return found


def _nothing() -> None:
    """Traces keep nothing that would have to be dropped."""


class _Strongly:
    """A reference that keeps."""

    __slots__ = ("to",)

    def __init__(self, to: Any) -> None:
        self.to = to

    def __call__(self) -> Any:
        return self.to
