"""One step of Muon on this rank's shards: the momentum before the matrices travel, the parameters after.

buf <- mu buf + g,    u = mu buf + g (nesterov) or buf,    p <- p (1 - lr weight_decay) - lr scale(rows, columns) NS(u)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hp_optim.muon.batches import Batch, Lane, Stack
from hp_optim.muon.devices import Devices
from hp_optim.muon.exchange import Results
from hp_optim.muon.kinds import Iteration, Transform
from hp_optim.muon.newton_schulz import newton_schulz_again
from hp_optim.muon.owners import Task
from hp_optim.muon.pieces import cut_row, in_a_row, joined, piece_of
from hp_optim.muon.routes import Cut
from hp_optim.muon.transform import transformed
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class Updated(NamedTuple):
    """A parameter of the step; all tensors are this rank's own, outside of the graph."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    lr: Any
    """A number, or a tensor of one element on the device."""
    weight_decay: float
    mu: float
    is_nesterov: bool
    scale: Callable[[int, int], float]
    group: int
    """Of the optimizer: learning rate and all below are the group's."""


class Step:
    """What :func:`hp_optim.muon.pipeline.run` does with each batch."""

    def __init__(
        self,
        platform: Platform,
        updated: Sequence[Updated],
        devices: Devices,
        name_of: Callable[[int], str],
    ) -> None:
        """``name_of``: a position in ``updated`` -> the parameter's name, for messages."""
        self._platform, self._updated, self._devices = platform, updated, devices
        self._name_of = name_of
        self._numbers_of_step: dict[tuple[str, int, int, int], Tensor] = {}
        """Of this step: by device, group, rows and columns."""
        self._waiting: dict[int, list[tuple[Cut, Tensor]]] = {}
        """By parameter what has come of its update, where it can only be written as a whole."""
        for each in updated:
            if 0 in each.parameter.shape:
                # Nothing to write, which counts as a write all the same: runtimes look at counts, and all ranks must find one.
                platform.mul_(each.parameter, 1.0)

    # --- before
    def packed(self, batch: Batch) -> Tensor:
        """See :class:`hp_optim.muon.pipeline.Steps`."""
        platform, lane, cuts = self._platform, batch.lane, batch.packed_cuts
        if not platform.supports("write_into_view", lane.storage):
            self._move_momentum(batch.due)
            row = in_a_row(platform, self._directions(cuts), lane.sent, lane.storage)
            return platform.to_device(row, lane.device)
        row = platform.empty((batch.packed_size,), lane.sent, lane.storage)
        found = [self._updated[cut.parameter] for cut in cuts] if batch.is_whole else []
        if found and self._has_kernels(lane) and all(map(self._lies_in_order, found)):
            momenta = [each.momentum for each in found]
            name = ("pack", batch, tuple([(each.mu, each.is_nesterov) for each in found]))
            memory = (row, *momenta, *[each.gradient for each in found])
            self._devices.repeated(lane.storage).run(name, memory, lambda: self._pack(batch, row), momenta)
        else:
            self._pack(batch, row)
        return platform.to_device(row, lane.device)

    def _lies_in_order(self, each: Updated) -> bool:
        return self._platform.is_contiguous(each.gradient) and self._platform.is_contiguous(each.momentum)

    def _has_kernels(self, lane: Lane) -> bool:
        """Whether momentum and updates take no memory of their own."""
        platform = self._platform
        if not platform.supports("numbers_on_device", lane.storage):
            return False
        is_narrow = all(platform.itemsize(dtype) <= 4 for dtype in (lane.sent, lane.computed))
        return is_narrow and platform.dtype_name(lane.kept) == "float32"

    def _pack(self, batch: Batch, row: Tensor) -> None:
        platform, cuts = self._platform, batch.packed_cuts
        targets = cut_row(platform, row, [cut.box.size for cut in cuts])
        # What is all that this rank has of a parameter is written in the pass that moves its momentum.
        whole = {cuts[place].parameter: targets[place] for place in batch.whole}
        self._move_and_write(whole)
        self._move_momentum([number for number in batch.due if number not in whole])
        rest = sorted(set(range(len(cuts))) - set(batch.whole))
        found = self._directions([cuts[place] for place in rest])
        platform.foreach_copy_([targets[place] for place in rest], found)

    def _move_and_write(self, targets: Mapping[int, Tensor]) -> None:
        """The momentum of parameters, and their ``u`` into targets of their shape."""
        found = [(self._updated[number], target) for number, target in targets.items()]
        for (mu, is_nesterov), moved in grouped(((x.mu, x.is_nesterov), (x, target)) for x, target in found):
            self._platform.momentum_(
                [each.momentum for each, _ in moved],
                [each.gradient for each, _ in moved],
                [target for _, target in moved],
                momentum=mu,
                nesterov=is_nesterov,
            )

    def _move_momentum(self, due: Sequence[int]) -> None:
        """Product and sum are rounded one by one, as above."""
        for mu, moved in grouped((self._updated[number].mu, self._updated[number]) for number in due):
            momenta = [each.momentum for each in moved]
            self._platform.foreach_mul_(momenta, mu)
            self._platform.foreach_add_(momenta, [each.gradient for each in moved])

    def _directions(self, cuts: Sequence[Cut]) -> list[Tensor]:
        """``u`` of each, in the dtype of the momentum, which has moved."""
        platform, found = self._platform, []
        for cut in cuts:
            each = self._updated[cut.parameter]
            u = piece_of(platform, each.momentum, cut)
            if each.is_nesterov:
                u = platform.mul_(platform.clone(u), each.mu)
                u = platform.add_(u, piece_of(platform, each.gradient, cut))
            found.append(u)
        return found

    # --- on the device
    def orthogonalised(self, batch: Batch, stack: Stack, x: Tensor) -> Tensor:
        """See :class:`hp_optim.muon.pipeline.Steps`."""
        kind = stack.kind
        if isinstance(kind, Transform):
            tasks = batch.tasks
            return transformed(
                self._platform, kind, x, lambda: [self._name_of(tasks[at].parameter) for at in stack.tasks]
            )
        assert isinstance(kind, Iteration)
        return newton_schulz_again(
            self._platform,
            self._devices.repeated(self._platform.device_of(x)),
            x,
            coefficients=kind.coefficients,
            steps=kind.steps,
            dtype=kind.dtype,
        )

    # --- after
    def apply(self, batch: Batch, results: Results) -> None:
        """See :class:`hp_optim.muon.pipeline.Steps`."""
        platform = self._platform
        if self._moves_by_numbers(batch):
            self._move_by_numbers(batch, results)
            return
        if not platform.supports("write_into_view", batch.lane.storage):
            for cut, result in zip(batch.applied_cuts, results.pieces(), strict=True):
                self._wait_for_all(batch, cut, result)
            return
        moves = []
        for cut, result in zip(batch.applied_cuts, results.pieces(), strict=True):
            each, task = self._updated[cut.parameter], batch.tasks[cut.task]
            target = piece_of(platform, each.parameter, cut)
            key = (
                id(each.lr) if platform.is_tensor(each.lr) else each.lr,
                each.weight_decay,
                each.scale(task.rows, task.columns),
            )
            moves.append((key, (each, target, result)))
        for (_, weight_decay, scale), found in grouped(moves):
            move(
                platform,
                [target for _, target, _ in found],
                [result for _, _, result in found],
                found[0][0].lr,
                weight_decay,
                scale,
            )

    def _moves_by_numbers(self, batch: Batch) -> bool:
        """Whether kernels move all that the batch is applied to, by a learning rate that the host knows.

        Not in a step that the caller records: the learning rate would lie on the device only when that is launched.
        """
        platform, lane = self._platform, batch.lane
        if not batch.is_whole or lane.storage != lane.device or not self._has_kernels(lane):
            return False
        if self._devices.repeated(lane.storage).is_paused:
            return False
        wide, found = platform.dtype("float32"), [self._updated[cut.parameter] for cut in batch.applied_cuts]
        return bool(found) and not any(
            platform.is_tensor(each.lr)
            or each.parameter.dtype != wide
            or not platform.is_contiguous(each.parameter)
            for each in found
        )

    def _move_by_numbers(self, batch: Batch, results: Results) -> None:
        """One launch. See [Note: the host's time]."""
        device = batch.lane.storage
        by_number: dict[int, tuple[Tensor, list[int]]] = {}
        """By its identity a tensor of numbers, and for which of the cuts it is."""
        parameters = []
        for at, cut in enumerate(batch.applied_cuts):
            each = self._updated[cut.parameter]
            numbers = self._numbers_of(each, batch.tasks[cut.task], device)
            by_number.setdefault(id(numbers), (numbers, []))[1].append(at)
            parameters.append(each.parameter)
        groups = list(by_number.values())

        def work() -> None:
            pieces = results.pieces()
            for numbers, places in groups:
                self._platform.move_by_(
                    [parameters[at] for at in places], [pieces[at] for at in places], numbers
                )

        name = ("apply", batch, tuple([tuple(places) for _, places in groups]))
        memory = (*parameters, *results.memory, *[numbers for numbers, _ in groups])
        self._devices.repeated(device).run(name, memory, work, parameters)

    def _numbers_of(self, each: Updated, task: Task, device: str) -> Tensor:
        key = (device, each.group, task.rows, task.columns)
        found = self._numbers_of_step.get(key)
        if found is None:
            lr, decay, scale = each.lr, each.weight_decay, each.scale(task.rows, task.columns)
            found = self._devices.numbers(device, key[1:], 1.0 - lr * decay, -lr * scale)
            self._numbers_of_step[key] = found
        return found

    def _wait_for_all(self, batch: Batch, cut: Cut, result: Tensor) -> None:
        """Keep a part of an update; when all of them are there, write the parameter."""
        platform, each, task = self._platform, self._updated[cut.parameter], batch.tasks[cut.task]
        scaled = platform.mul_(
            platform.clone(platform.cast(result, each.parameter.dtype)), each.scale(task.rows, task.columns)
        )
        waiting = self._waiting.setdefault(cut.parameter, [])
        waiting.append((cut, scaled))
        if sum(other.box.volume for other, _ in waiting) < math.prod(each.parameter.shape):
            return
        del self._waiting[cut.parameter]
        runs = []
        for held, parts in sorted(
            grouped((other.held, (other.box, x)) for other, x in waiting),
            key=lambda found: found[0].start or 0,
        ):
            whole = joined(platform, dict(parts))
            runs.append(whole if held.start is None else platform.reshape(whole, (-1,)))
        update = runs[0] if len(runs) == 1 else platform.cat(runs)
        move(platform, [each.parameter], [update], each.lr, each.weight_decay, 1.0)


def move(
    platform: Platform,
    parameters: Sequence[Tensor],
    results: Sequence[Tensor],
    lr: Any,
    weight_decay: float,
    scale: float,
) -> None:
    """``p <- p (1 - lr weight_decay) - lr scale U`` of each. A learning rate on the device stays there."""
    if not platform.is_tensor(lr):
        platform.move_(parameters, results, keep=1.0 - lr * weight_decay, factor=-lr * scale)
        return
    one = platform.full((), 1.0, lr.dtype, platform.device_of(lr))
    decay = platform.add_(platform.reshape(platform.clone(lr), ()), 0.0)
    if weight_decay:
        platform.foreach_mul_(parameters, platform.add_(one, decay, -weight_decay))
    updates = [platform.clone(platform.cast(x, p.dtype)) for x, p in zip(results, parameters, strict=True)]
    platform.foreach_mul_(updates, platform.mul_(decay, -scale))
    platform.foreach_add_(parameters, updates)


def grouped(pairs: Any) -> Any:
    """``(key, value)`` pairs by key, in the order in which keys first occur."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return list(found.items())
