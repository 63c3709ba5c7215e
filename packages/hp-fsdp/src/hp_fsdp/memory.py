"""What a sharded model needs of a rank's memory, by its layout: no measurement, and no run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.halves import Use, half_numel
from hp_fsdp.unit import Unit, unit_of, units_in
from hp_fsdp.whole import ALIGNMENT, receives_in_place
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.tensor import DType

MEBI = 2.0**20


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of one unit on this rank."""

    name: str
    """Of the unit's first module in the model; empty for the model itself."""
    shards: int
    """The pieces with their padding, and what is replicated; always."""
    gradients: int
    """Reduced gradients of the pieces, from the unit's reduction until they are cleared."""
    whole: int
    """Whole parameters in the dtype of computation while they are gathered."""
    kept_whole: int
    """Replicated parameters in the dtype of computation, if that is another one; always."""
    staging: int
    """Beside :attr:`whole` while it is being filled: the piece in the dtype of computation, offloaded pieces on the device, what
    has been received and is not in its place yet."""
    whole_gradients: int
    """Gradients of whole parameters, in the dtype of computation, while the unit's backward runs."""
    reduction: int
    """What is sent and received by its reduction, as far as it is not what becomes gradients, while that is under way."""
    stays_whole: bool
    """Whether it is gathered from forward to backward, as the root and its parts are."""
    is_offloaded: bool
    """Whether shards and gradients lie on the host."""
    kept_piece: int = 0
    """What is kept of the whole parameters from forward to backward, if they are cut among fewer ranks then."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a sharded model on this rank, without the optimizer's state and activations. ``print`` shows a table."""

    units: tuple[UnitMemory, ...]
    """In the order of the modules, outer ones first: the root, then the others."""
    num_ahead: int = 1
    """How many units are gathered ahead of the one that runs; one, unless prefetch lists say more."""
    peers: int = 0
    """Memory that all ranks of a machine reach, from the first step on: see [Note: small halves] in :mod:`hp_fsdp.halves`.
    Before the first step as far as this rank knows, by its own device and by which ranks the launcher has started on its host; from
    then on as it is. Without it, on several machines, say, collectives need a little more beside, which the units count."""

    @property
    def shards(self) -> int:
        """Of all units on the device."""
        return sum(unit.shards for unit in self.units if not unit.is_offloaded)

    @property
    def gradients(self) -> int:
        """Of all units on the device."""
        return sum(unit.gradients for unit in self.units if not unit.is_offloaded)

    @property
    def host(self) -> int:
        """Offloaded shards and gradients."""
        return sum(unit.shards + unit.gradients for unit in self.units if unit.is_offloaded)

    @property
    def gathered(self) -> int:
        """Whole parameters at their most: the root's, those that stay whole (or a piece of them), and of the others the one that
        runs and the one ahead.
        """
        passing = [unit.whole for unit in self.units if not unit.stays_whole]
        staying = sum(
            unit.kept_whole + (unit.whole if unit.stays_whole else unit.kept_piece) for unit in self.units
        )
        return staying + _largest(passing, 1 + self.num_ahead)

    @property
    def reductions(self) -> int:
        """Buffers of the two reductions that are under way at most."""
        return _largest((unit.reduction for unit in self.units), 2)

    @property
    def peak(self) -> int:
        """Highest sum on the device in a step, beside the optimizer's state and activations: what is always there, all gradients,
        :attr:`gathered`, :attr:`reductions`, and either a unit's gradients before they are reduced or what a gather needs beside.
        The root's whole gradients (a head's, say) wait beside those of the others until backward ends.
        """
        passing = max((max(unit.whole_gradients, unit.staging) for unit in self.units), default=0)
        root, *others = self.units
        if root.name == "":
            beside = max((max(unit.whole_gradients, unit.staging) for unit in others), default=0)
            passing = max(root.staging, root.whole_gradients + beside)
        return self.shards + self.gradients + self.gathered + self.reductions + self.peers + passing

    def __str__(self) -> str:
        """A line per unit and one for the whole, in MiB."""
        columns = ("shards", "gradients", "whole", "reduction", "whole_gradients")
        width = max(len(unit.name) for unit in self.units)
        width = max(width, len("peak on device"))
        lines = [" ".join([f"{'unit':{width}}", *(f"{name:>15}" for name in columns)])]
        for unit in self.units:
            figures = (f"{getattr(unit, name) / MEBI:15.2f}" for name in columns)
            lines.append(" ".join([f"{unit.name or '(root)':{width}}", *figures]))
        for label, nbytes in (
            ("gathered", self.gathered),
            ("reductions", self.reductions),
            ("peer memory", self.peers),
            ("on the host", self.host),
            ("peak on device", self.peak),
        ):
            lines.append(f"{label:{width}} {nbytes / MEBI:15.2f}")
        return "\n".join(lines)


def memory_plan(model: Any) -> MemoryPlan:
    """What the sharded ``model`` needs of this rank's memory, in bytes: per unit, and at most at a time.

    It is computed from the layout, so it can be asked before the first step, and for parameters on the meta device.
    Gradients are those of parameters that train now, reduced by every backward; without synchronisation
    (``set_requires_gradient_sync(False)``) a unit also keeps its ``whole_gradients``, in the dtype of the reduction, and those
    that would travel narrower take peer memory in that dtype, too. The
    optimizer's state and activations come on top. Figures differ between ranks where dims do not divide. A parameter with an
    extension counts as if it had none.

    ValueError if ``model`` has no sharded modules. No communication.
    """
    platform = get_platform()
    units = list(units_in(platform, model)) if platform.is_module(model) else []
    if not units:
        raise ValueError(
            f"memory_plan takes a model with modules that fully_shard was called on, got {type(model).__name__}"
        )
    names: dict[int, str] = {}
    for name, module in platform.named_modules(model):
        unit = unit_of(module)
        if unit is not None:
            names.setdefault(id(unit), name)
    lists = [x for unit in units for x in (unit.options.forward_prefetch, unit.options.backward_prefetch)]
    ahead = max((len(told) for told in lists if told is not None), default=0)
    if any(told is None for told in lists):
        ahead = max(ahead, 1)
    inner = {
        id(each)
        for unit in units
        for module in unit.modules
        for each in units_in(platform, module)
        if each is not unit
    }
    found = []
    for unit in units:
        is_root = id(unit) not in inner or unit.part_of is not None  # parts are freed when the root is
        found.append(_unit_memory(platform, unit, names[id(unit)], is_root=is_root))
    return MemoryPlan(tuple(found), ahead, _peer_memory(platform, units))


def _peer_memory(platform: Platform, units: list[Unit]) -> int:
    """Bytes of the halves, two for each use, dtype and group."""
    longest: dict[Any, int] = {}
    for unit in units:
        group = unit.places.shard_group
        longest[group] = max(longest.get(group, 0), unit.longest_row)
    needed: set[tuple[Any, Use, DType]] = set()
    for unit in units:
        if not unit.expects_peers:
            continue
        lines = unit.arrangement.lines(tuple(param.trains for param in unit.params))
        uses: list[tuple[Use, DType]] = [("exchange", each.narrow_dtype or each.dtype) for each in lines]
        cut = [param for param in unit.params if param.slot is not None and not param.is_extended]
        moved = {param.compute_dtype for param in cut if param.slot is not None and not param.slot.is_leading}
        uses.extend(("gather", param.compute_dtype) for param in cut if param.compute_dtype not in moved)
        needed.update((unit.places.shard_group, use, dtype) for use, dtype in uses)
    return sum(
        2 * platform.itemsize(dtype) * half_numel(use, longest[group], group.size, platform.itemsize(dtype))
        for group, use, dtype in needed
    )


def _largest(numbers: Iterable[int], count: int) -> int:
    return sum(sorted(numbers, reverse=True)[:count])


def _unit_memory(platform: Platform, unit: Unit, name: str, *, is_root: bool) -> UnitMemory:
    arrangement, options = unit.arrangement, unit.options
    size = platform.itemsize
    uncut = [param for param in unit.params if param.dim is None]
    casts = [param for param in uncut if not arrangement.is_alias(param)]
    shards = sum(buffer.plan.numel * size(buffer.dtype) for buffer in arrangement.buffers)
    together: dict[DType, list[FlatBuffer]] = {}
    for buffer in arrangement.buffers:
        if not arrangement.is_alias(buffer.params[0]):
            together.setdefault(buffer.params[0].compute_dtype, []).append(buffer)
    gradients, whole_gradients, reduction = _gradients(platform, unit)
    told = options.reshard_as_told
    whole = sum(_whole(platform, unit, dtype, buffers) for dtype, buffers in together.items())
    return UnitMemory(
        name=name,
        shards=shards + sum(math.prod(param.shape) * size(param.dtype) for param in uncut),
        gradients=gradients,
        whole=whole,
        kept_whole=sum(math.prod(param.shape) * size(param.compute_dtype) for param in casts),
        staging=sum(_staging(platform, unit, dtype, buffers) for dtype, buffers in together.items()),
        whole_gradients=whole_gradients,
        reduction=reduction,
        stays_whole=is_root or (options.reshard_after_forward is False if told is None else not told),
        is_offloaded=arrangement.host is not None,
        kept_piece=0 if unit.small_world is None else -(-whole // unit.small_world.group.size),
    )


def _whole(platform: Platform, unit: Unit, dtype: DType, buffers: list[FlatBuffer]) -> int:
    device = unit.places.device
    align = platform.supports("storage_views", device) and platform.supports("write_into_view", device)
    numel = 0
    for buffer in buffers:
        for slot in buffer.plan.slots:
            room = slot.num_ranks * slot.numel if slot.is_leading else slot.whole_numel
            numel = numel + (-(-room // ALIGNMENT) * ALIGNMENT if align else room)
    return numel * platform.itemsize(dtype)


def _staging(platform: Platform, unit: Unit, dtype: DType, buffers: list[FlatBuffer]) -> int:
    ranks, size = unit.places.num_shards, platform.itemsize(dtype)
    found = sum(
        buffer.plan.numel * platform.itemsize(buffer.dtype) for buffer in buffers if buffer.host is not None
    )
    if ranks == 1 and platform.supports("write_into_view", unit.places.device):
        return found
    if unit.expects_peers and all(slot.is_leading for buffer in buffers for slot in buffer.plan.slots):
        return found  # pieces are cast into their halves
    found = found + sum(buffer.plan.numel * size for buffer in buffers if buffer.dtype != dtype)
    slots = [slot for buffer in buffers for slot in buffer.plan.slots]
    if receives_in_place(platform, unit.places, is_fused=unit.options.is_fused):
        slots = [slot for slot in slots if not slot.is_leading]
    return found + ranks * size * sum(slot.numel for slot in slots)


def _gradients(platform: Platform, unit: Unit) -> tuple[int, int, int]:
    """Bytes of gradients of shards, of whole parameters, and of what a reduction needs beside."""
    places, keeps_main = unit.places, unit.options.precision.keeps_main_grad
    gradients, whole_gradients, reduction = 0, 0, 0
    for lines in unit.arrangement.lines(tuple(param.trains for param in unit.params)):
        size = platform.itemsize(lines.dtype)
        replicated = sum(lines.replicated_sizes)
        received = (sum(lines.sizes) + replicated) * size
        if places.num_shards > 1:
            narrow = lines.narrow_dtype
            # Of narrow ones as much is received as is sent, before it is added up; peers receive in their halves.
            sent = lines.nbytes(lines.dtype if narrow is None else narrow)
            if narrow is not None and not unit.expects_peers:
                sent = 2 * sent
            reduction = reduction + sent + replicated * size
        casts = [param for param in lines.params if param.dtype != lines.dtype and not keeps_main]
        gradients = gradients + sum(
            math.prod(param.local_shape(places.shard_rank)) * platform.itemsize(param.dtype)
            for param in casts
        )
        if len(casts) < len(lines.params):  # gradients are parts of what was received
            gradients = gradients + received
        if len(casts) == len(lines.params) or unit.arrangement.host is not None:
            reduction = reduction + received
        whole_gradients = whole_gradients + sum(
            math.prod(param.shape) * platform.itemsize(param.compute_dtype) for param in lines.params
        )
    return gradients, whole_gradients, reduction
