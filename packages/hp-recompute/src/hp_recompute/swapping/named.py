"""What a manager offers by the names of groups: for those who move them by hand, and look at them.

Groups of :func:`hp_recompute.swap` and of wrapped modules move by themselves; moving one earlier by hand does no harm. Their names are
those of the functions, of the place in a chain, or what :meth:`NamedGroups.set_current_group_name` was given; a name stands for the
newest group of that name which backward still needs. Groups made here move only by hand.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from hp_platform.platform import Platform
from hp_platform.protocols.local_wrapper import is_local_wrapper
from hp_platform.protocols.tensor import Tensor
from hp_recompute.swapping.chain import Link, join, link_of
from hp_recompute.swapping.group import BY_HAND, Group
from hp_recompute.swapping.storage import SavedTensor


class NamedGroups:
    """A part of :class:`hp_recompute.SwapManager`."""

    platform: Platform
    _live: weakref.WeakValueDictionary[int, Group]
    _ended: list[Group]
    _kept: dict[str, tuple[Group, list[SavedTensor]]]
    """Groups that were made here, with all that was added to them."""
    _next_name: str | None
    _num_links: int

    @property
    def current(self) -> Group | None:
        """The group that is saved to now."""
        raise AssertionError("the manager knows")

    def ensure_group(self, name: str) -> None:
        """Make a group that moves by hand, if there is none of that name. ValueError for what is no name."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"a group is called by a text that is not empty, got {name!r}")
        if name not in self._kept:
            self._kept[name] = (Group(self, name, BY_HAND, fused=False), [])

    def add_storage(self, name: str, storage: Tensor) -> SavedTensor:
        """Let the memory of a tensor move with the group that :meth:`ensure_group` has made.

        Args:
            name: the group's.
            storage: a tensor, or DTensor, on a device that has a memory of its own.

        Returns what stands for the tensor from now on: its ``get()`` is the tensor on its device. The caller drops the tensor itself, which
        would hold the memory. UserWarning, and what stood for it before, for a tensor that the group has already. ValueError for
        what has no memory of a device, RuntimeError for an unknown group.
        """
        if name not in self._kept:
            raise RuntimeError(self._unknown(name))
        group, kept = self._kept[name]
        x = storage.__hp_local__() if is_local_wrapper(storage) else storage
        if not self.platform.is_tensor(x):
            raise ValueError(f"add_storage takes a tensor, got {type(storage).__name__}")
        found = next((saved for saved in kept if saved.shows(x)), None)
        if found is not None:
            warnings.warn(
                f"group {name!r} has this tensor of shape {tuple(x.shape)} already: nothing was added",
                stacklevel=2,
            )
            return found
        saved = group.save(x)
        if saved.storage is None:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} on {self.platform.device_of(x)} cannot be swapped: give one that is no parameter, "
                "with elements, on a device that has a memory of its own"
            )
        kept.append(saved)
        return saved

    def launch_offload(self, name: str, copy_stream: Any = None) -> None:
        """Let the group start for the host. RuntimeError for an unknown group, here and below.

        ``copy_stream``: a stream of the device that copies, such as ``platform.device(...).new_stream()`` gives or the framework's own;
        None: the manager's. Copies of all groups happen in the order in which they were launched, whatever their streams.
        """
        self._group(name).launch_offload(copy_stream)

    def wait_offload(self, name: str) -> None:
        """Let the computation wait for it, and let go of the memory on the device. RuntimeError unless it was launched."""
        group = self._group(name)
        if not group.is_leaving:
            raise RuntimeError(f"group {name!r} is not on its way to the host: call launch_offload before")
        group.wait_offload()

    def launch_load(self, name: str, copy_stream: Any = None) -> None:
        """Let what is on the host start for the device; ``copy_stream`` as above."""
        self._group(name).launch_load(copy_stream)

    def wait_load(self, name: str) -> None:
        """Let the computation wait for it. RuntimeError unless it was launched."""
        group = self._group(name)
        if not group.is_coming:
            raise RuntimeError(f"group {name!r} is not on its way to the device: call launch_load before")
        group.wait_load()

    def release_group_storage(self, name: str) -> None:
        """Let go of what came back to the device, whose bytes are on the host still."""
        self._group(name).release()

    def drop_group(self, name: str) -> None:
        """Forget a group that :meth:`ensure_group` has made; what :meth:`add_storage` gave works on."""
        if name not in self._kept:
            raise RuntimeError(self._unknown(name))
        del self._kept[name]

    def protect_alias_tensors(self, name: str, tensors: Any) -> None:
        """What is over the memory of these tensors (in containers) stays on the device. It matters until the group starts."""
        self._group(name).protect(tensors)

    def get_current_group_name(self) -> str | None:
        """Of the group that is saved to now; else the name that the next one will have, if it was set."""
        return self.current.name if self.current is not None else self._next_name

    def set_current_group_name(self, name: str | None) -> None:
        """Call the groups so that begin from now on (but for layers of a chain); None: by their functions."""
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"a group is called by a text that is not empty, or None, got {name!r}")
        self._next_name = name

    def is_last_group(self, name: str) -> bool:
        """Whether it stays on the device: the last of its chain; without one, none has begun since it ended."""
        group = self._group(name)
        if group.link is not None:
            return group.link.after is None
        return any(each is group for each in self._ended)

    def group_nbytes(self, name: str) -> tuple[int, int]:
        """Bytes of what it has saved and may move: on the device, and on the host only."""
        return self._group(name).nbytes

    def set_forward_prefetch_layer(self, first: Any, second: Any) -> None:
        """Tell that ``second`` follows ``first``: both are layers of a chain from now on, see :mod:`hp_recompute.swapping.chain`.

        Layers that do not swap already (:func:`hp_recompute.swap_wrapper`) swap what :func:`hp_recompute.swap_tensor_wrapper` is given in
        them, and keep the rest: while they run, copies of others may take their time.
        Setting the same again does nothing. UserWarning for the same layer twice; ValueError for what is no module, for a layer that has
        another neighbour already, and for a chain that would be a ring.
        """
        if join(self.platform, first, second, self._new_link_name):
            from hp_recompute.swapping.wrappers import ensure_layer

            for layer in (first, second):
                ensure_layer(layer)

    def chain_of(self, layer: Any) -> list[str]:
        """The names of the layers of its chain, in order; empty for a layer of none."""
        link: Link | None = link_of(layer)
        while link is not None and link.before is not None:
            link = link.before
        names = []
        while link is not None:
            names.append(link.name)
            link = link.after
        return names

    def _new_link_name(self) -> str:
        self._num_links = self._num_links + 1
        return f"swap_group_{self._num_links - 1}"

    def _group(self, name: str) -> Group:
        if name in self._kept:
            return self._kept[name][0]
        found = [group for group in self._live.values() if group.name == name and group.is_alive]
        if not found:
            raise RuntimeError(self._unknown(name))
        return max(found, key=lambda group: group.ordinal)

    def _unknown(self, name: str) -> str:
        known = sorted({group.name for group in self._live.values() if group.is_alive} | set(self._kept))
        return (
            f"there is no group {name!r} that backward still needs; there are {', '.join(map(repr, known)) or 'none'}: "
            "ensure_group makes one that moves by hand"
        )
