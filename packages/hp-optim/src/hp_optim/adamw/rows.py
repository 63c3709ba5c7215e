"""Parameters whose shards lie in one flat row, updated as one tensor.

[Note: flat rows] Who shards parameters may keep all shards of a rank in one row (:mod:`hp_platform.protocols.flat_shards`), and their
gradients lie in one, too, as a reduction has left them. If all parameters of a row are in one group and have made equally many steps,
then the moments lie in rows of the same layout as well, and a step is one launch on three or four tensors instead of hundreds: the
host's time counts, since a step of few samples is bound by it. ``state[parameter]`` has DTensors whose local tensors are parts of
those rows, so that whoever reads or writes state by parameter needs to know nothing of it. AdamW works element by element, so the
numbers are the same, bit for bit; what a row has between the shards is updated along, and means nothing.

Everything that the launch relies on is looked up at every step: where shards, gradients and state lie. A parameter without a gradient,
or one whose gradient or state somebody has exchanged, makes its row's parameters go one by one for that step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_optim.adamw.kernel import Launches, moments, state_dtype
from hp_optim.adamw.member import MISSED, Member
from hp_optim.adamw.replicas import Place
from hp_optim.base import MAIN_GRAD, STEP
from hp_optim.groups import Group
from hp_optim.pieces import local_of, placed
from hp_platform.platform import Platform
from hp_platform.protocols.flat_shards import FlatRow
from hp_platform.protocols.tensor import Tensor


class RowOfMembers:
    """One flat row, all of whose parameters are in one group."""

    def __init__(self, platform: Platform, flat: FlatRow, members: Sequence[Member], state: Any) -> None:
        self.platform = platform
        self.row = flat.row
        self.members = tuple(members)
        self.state = state
        self._numel = int(flat.row.shape[0])
        self._offsets = flat.offsets
        self._numels = [math.prod(tuple(local_of(p).shape)) for p in flat.parameters]
        full = [at for at, numel in enumerate(self._numels) if numel]
        self._parameters = [flat.parameters[at] for at in full]
        """Those with elements here."""
        self._empty = [flat.parameters[at] for at, numel in enumerate(self._numels) if not numel]
        starts = [flat.offsets[at] for at in full]
        begin, size = platform.data_ptr(flat.row), platform.itemsize(flat.row.dtype)
        self._addresses = [begin + start * size for start in starts]
        self._start = starts[0] if starts else 0
        self._steps = [start - self._start for start in starts]
        """Where shards begin behind the first one."""
        self._flats: list[Tensor] = []
        """The moments."""
        self._kept: list[tuple[Any, ...]] = []
        """Of every parameter the tensors of its state, which are parts of :attr:`_flats`."""
        self._missed = 0
        self._num_moments = 0
        """What is kept of a parameter; 0: nothing yet."""

    def stands(self) -> bool:
        """Whether the shards still are parts of the row."""
        return list(map(self.platform.data_ptr, map(local_of, self._parameters))) == self._addresses

    def gradients(self) -> Tensor | None:
        """The row of gradients, if every parameter has one and they lie in a row as the shards do."""
        platform = self.platform
        found: list[Any] = [self._gradient(parameter) for parameter in self._parameters]
        if not found or any(gradient is None for gradient in found):
            return None
        if any(self._gradient(parameter) is None for parameter in self._empty):
            return None
        first = found[0]
        size, start = platform.itemsize(first.dtype), platform.data_ptr(first)
        places = [address - start for address in map(platform.data_ptr, found)]
        if places != [step * size for step in self._steps] or not all(map(platform.is_contiguous, found)):
            return None
        if any(gradient.dtype != first.dtype for gradient in found):
            return None
        base = platform.view_base(first)
        base = first if base is None else base
        if not platform.is_contiguous(base):
            return None
        begin = (start - platform.data_ptr(base)) // size - self._start
        whole = platform.reshape(platform.detach(base), (-1,))
        if begin < 0 or begin + self._numel > whole.shape[0]:
            return None
        return platform.narrow(whole, 0, begin, self._numel)

    def _gradient(self, parameter: Any) -> Tensor | None:
        """None, too, for one that has to be looked at by itself: it lies otherwise than the parameter."""
        wide = getattr(parameter, MAIN_GRAD, None)
        if wide is None:
            return self.platform.get_grad(parameter.to_local())
        spec = getattr(wide, "_spec", None)
        if spec is not None:
            return wide.to_local() if spec is parameter._spec else None
        return wide if tuple(wide.shape) == tuple(parameter.to_local().shape) else None

    def add_to(self, launches: Launches, gradients: Tensor) -> bool:
        """Have the row updated; False, and nothing has changed, if the state of its parameters does not allow it."""
        group = launches.group
        if not self._is_flat(group) and not self._flatten(group, gradients):
            return False
        launches.add(self.members[0].device, group[STEP] - self._missed, self.row, gradients, self._flats)
        return True

    def places(self) -> Sequence[Place]:
        """Where pieces of other replicas belong."""
        return ()

    def _is_flat(self, group: Group) -> bool:
        """Whether the state is what it was made to be."""
        keys = moments(group)
        if len(keys) != self._num_moments:
            return False
        find, missed = self.state.get, self._missed
        first, second = keys[0], keys[1]
        for member, kept in zip(self.members, self._kept, strict=True):
            entry = find(member.parameter)
            if (
                not entry
                or entry.get(first) is not kept[0]
                or entry.get(second) is not kept[1]
                or entry.get(MISSED, 0) != missed
                or (len(keys) > 2 and entry.get(keys[2]) is not kept[2])
            ):
                return False
        return True

    def _flatten(self, group: Group, gradients: Tensor) -> bool:
        """Let the state lie in rows: what is there moves in."""
        platform, keys = self.platform, moments(group)
        entries = [self.state.get(member.parameter) or None for member in self.members]
        are_there = all(entry is not None for entry in entries)
        if any(entry is not None for entry in entries) and not are_there:
            return False
        missed, dtype = group["step"] - 1, state_dtype(platform, self.row, gradients)
        if are_there:
            found = [member.entry(group, gradients) for member in self.members]
            counts = {entry.get(MISSED, 0) for entry in found}
            dtypes = {entry[key].dtype for entry in found for key in keys}
            if len(counts) > 1 or len(dtypes) > 1:
                return False
            missed, dtype = counts.pop(), dtypes.pop()
            self.members[0].home.landed()
        device = platform.device_of(self.row)
        self._flats = [self.members[0].home.zeros((self._numel,), dtype, device) for _ in keys]
        kept: list[list[Any]] = [[] for _ in self.members]
        for key, flat in zip(keys, self._flats, strict=True):
            for number, member in enumerate(self.members):
                entry = self.state[member.parameter]
                entry[key] = self._part(flat, number, entry.get(key))
                kept[number].append(entry[key])
        if missed and not are_there:
            for member in self.members:
                self.state[member.parameter][MISSED] = missed
        self._kept, self._missed, self._num_moments = [tuple(each) for each in kept], missed, len(keys)
        return True

    def _part(self, flat: Tensor, number: int, before: Any) -> Any:
        platform, parameter, numel = self.platform, self.members[number].parameter, self._numels[number]
        shape = tuple(parameter.to_local().shape)
        if not numel:
            return placed(parameter, platform.zeros(shape, flat.dtype, platform.device_of(flat)))
        part = platform.narrow(flat, 0, self._offsets[number], numel)
        if before is not None:
            platform.copy_(part, platform.reshape(local_of(before), (-1,)))
        return placed(parameter, platform.reshape(platform.alias(part), shape))


class RowOfPieces(RowOfMembers):
    """A row whose parameters are divided over replicas.

    What is updated are pieces of it, a list; but where they lie, and the state beside them, is looked up once, and gradients are
    found as one row.
    """

    def __init__(self, platform: Platform, flat: FlatRow, members: Sequence[Member], state: Any) -> None:
        super().__init__(platform, flat, members, state)
        self._places: list[Place] = []
        self._with_elements: list[int] = []
        self._cuts: list[int] = []
        """Sizes of the parts of a row, of which every second one is a piece."""
        end = 0
        for number, (member, offset, numel) in enumerate(
            zip(self.members, self._offsets, self._numels, strict=True)
        ):
            if not numel:
                continue
            division = member.division
            assert division is not None
            rows = int(member.parameter.to_local().shape[0])
            shard = platform.narrow(flat.row, 0, offset, numel)
            place = Place(platform, shard, division, rows=rows)
            start = offset + division.start * (numel // rows)
            self._cuts.extend((start - end, int(place.own.shape[0])))
            end = start + int(place.own.shape[0])
            self._places.append(place)
            self._with_elements.append(number)
        self._cuts.append(self._numel - end)
        self._own = [place.own for place in self._places]
        self._state: list[list[Tensor]] = []
        """One list per moment."""

    def add_to(self, launches: Launches, gradients: Tensor) -> bool:
        """Have the pieces updated; False, and nothing has changed, if the state does not allow it."""
        group = launches.group
        if not self._is_flat(group) and not self._looked_up(group):
            return False
        if self._places:
            pieces = self.platform.split(gradients, self._cuts)[1::2]
            count = group[STEP] - self._missed
            launches.add_all(self.members[0].device, count, self._own, pieces, self._state)
        return True

    def places(self) -> Sequence[Place]:
        """Of all parameters with elements."""
        return self._places

    def _looked_up(self, group: Group) -> bool:
        """State of all parameters, made where there is none yet; False if they have made different numbers of steps."""
        platform, keys = self.platform, moments(group)
        found = []
        for member in self.members:
            gradient = member.gradient()
            assert gradient is not None
            entry = member.entry(group, gradient)
            for key in keys:
                value = local_of(entry[key])
                if not platform.is_contiguous(
                    value
                ):  # it came from elsewhere, and is written as a 1-D view below
                    entry[key] = member.placed(member.home.copied(value, member.device))
            found.append(entry)
        counts = {entry.get(MISSED, 0) for entry in found}
        dtypes = {entry[key].dtype for entry in found for key in keys}
        if len(counts) > 1 or len(dtypes) > 1:
            return False
        self._kept = [tuple(entry[key] for key in keys) for entry in found]
        self._state = [
            [platform.reshape(local_of(self._kept[number][at]), (-1,)) for number in self._with_elements]
            for at in range(len(keys))
        ]
        self._missed, self._num_moments = counts.pop(), len(keys)
        return True
