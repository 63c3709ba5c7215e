"""When what layers have saved travels, how much of it is on the device meanwhile, and how long a step takes.

[Note: what counts] While a layer runs forward, there are on the device what stays of the layers up to it, all that it saves, and what is
still on its way to the host. While a layer runs backward: what stays of the layers up to it, all that it had saved, what was fetched
for those before it, and the gradient that the layer behind it has made, which is as large as what that was given. The largest such
sum is the peak; what else a layer makes while it runs is no part of it.

[Note: what is waited for] Copies to the host begin when their layer has ended, one after the other, and take as long as they may: a layer
waits for as much to have left as it will save, if that would not fit. Backward fetches in the opposite order, when it comes
to a layer, as much as fits beside all layers that it passes until it is wanted. Both directions have the link for themselves:
forward only copies to the host, backward only from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hp_recompute.swapping.choices import LayerChoice


@dataclass(frozen=True)
class Rates:
    """Of copies, in bytes per millisecond."""

    to_host: float
    to_device: float


@dataclass(frozen=True)
class Timetable:
    """By layer, in the order of forward."""

    budget_nbytes: int
    left_at_end: tuple[int, ...]
    """Layers whose copies to the host must have ended when forward ends. The others that still move stay."""
    fetches: tuple[tuple[int, ...], ...]
    """Layers whose copies to the device begin when backward comes to this one."""
    loads: tuple[int, ...]
    """Bytes on the device while it runs, the most of forward and backward; see [Note: what counts]."""
    added_ms: float
    """Of a step, beside one in which all stays."""


def timetable(layers: Sequence[LayerChoice], device_budget_bytes: int, rates: Rates) -> Timetable | None:
    """With as little waiting as the budget allows; None where not even that fits. See [Note: what is waited for]."""
    stay = list(accumulate(each.stays_nbytes for each in layers))
    moving = [each.moving_nbytes for each in layers[:-1]] + [0]
    gradients = [*(each.cost.inputs_nbytes for each in layers[1:]), 0]
    own = [
        stays + each.moving_nbytes + each.again_nbytes + gradient
        for stays, each, gradient in zip(stay, layers, gradients, strict=True)
    ]
    if max(own) > device_budget_bytes:
        return None
    launched = [0, *accumulate(moving)]
    gone, needs, loads = 0, list[int](), list[int]()
    for place, each in enumerate(layers):
        whole = stay[place] + each.moving_nbytes
        gone = max(gone, launched[place] + whole - device_budget_bytes)
        needs.append(gone)
        loads.append(whole + launched[place] - gone)
    there = deque(place for place, nbytes in enumerate(moving) if nbytes)
    left = []
    while there and (launched[there[0]] < gone or not _stay_there(there, own, moving, device_budget_bytes)):
        left.append(there.popleft())
    fetches, backward = _fetches(own, moving, set(there), device_budget_bytes)
    return Timetable(
        device_budget_bytes,
        tuple(left),
        tuple(fetches),
        tuple(max(pair) for pair in zip(loads, backward, strict=True)),
        _added_ms(layers, needs, launched[left[-1] + 1] if left else 0, fetches, set(there), rates),
    )


def _stay_there(leaving: Sequence[int], own: Sequence[int], moving: Sequence[int], budget: int) -> bool:
    """Whether backward has room for what has not left when it begins."""
    return all(
        own[place] + sum(moving[each] for each in leaving if each < place) <= budget
        for place in range(leaving[0] + 1, len(own))
    )


def _fetches(
    own: Sequence[int], moving: Sequence[int], there: set[int], budget: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """What is fetched where, and the bytes on the device while layers run backward. ``there``: these have never left."""
    loads = [nbytes + sum(moving[each] for each in there if each < place) for place, nbytes in enumerate(own)]
    wanted = [place for place in range(len(own) - 1) if moving[place] and place not in there]
    fetches: list[tuple[int, ...]] = [()] * len(own)
    for place in reversed(range(len(own))):
        while wanted and wanted[-1] >= place:  # it is fetched when it is its turn
            wanted.pop()
        begun = []
        while wanted:
            passed = range(wanted[-1] + 1, place + 1)
            if max(loads[each] for each in passed) + moving[wanted[-1]] > budget:
                break
            for each in passed:
                loads[each] = loads[each] + moving[wanted[-1]]
            begun.append(wanted.pop())
        fetches[place] = tuple(begun)
    return fetches, loads


def _added_ms(
    layers: Sequence[LayerChoice],
    needs: Sequence[int],
    left_nbytes: int,
    fetches: Sequence[Sequence[int]],
    there: set[int],
    rates: Rates,
) -> float:
    """``needs``: bytes that must have gone when a layer begins; ``left_nbytes``: when forward ends."""
    now = link = 0.0
    out = _Link(rates.to_host)
    for place, each in enumerate(layers):
        now = max(now, out.time_of(needs[place])) + each.cost.forward_ms
        if each.moving_nbytes and place < len(layers) - 1:
            link = out.begin(now, each.moving_nbytes)
    now = max(now, out.time_of(left_nbytes))
    come = dict[int, float]()
    for place, each in reversed(list(enumerate(layers))):
        is_late = each.moving_nbytes and place < len(layers) - 1 and place not in there and place not in come
        for other in (*([place] if is_late else []), *fetches[place]):
            link = max(link, now) + layers[other].moving_nbytes / rates.to_device
            come[other] = link
        again = each.cost.forward_ms if each.choice == "recompute" else 0.0
        now = max(now, come.get(place, now)) + again + each.cost.backward_ms
    return now - sum(each.cost.forward_ms + each.cost.backward_ms for each in layers)


class _Link:
    """To the host: one copy after the other."""

    def __init__(self, rate: float) -> None:
        self._rate, self._end, self._nbytes = rate, 0.0, 0
        self._firsts, self._starts = list[int](), list[float]()

    def begin(self, now: float, nbytes: int) -> float:
        """A copy, as early as it can; when it ends."""
        start = max(self._end, now)
        self._firsts.append(self._nbytes)
        self._starts.append(start)
        self._nbytes, self._end = self._nbytes + nbytes, start + nbytes / self._rate
        return self._end

    def time_of(self, nbytes: int) -> float:
        """When so many bytes of all have gone."""
        if nbytes == 0:
            return 0.0
        place = bisect_left(self._firsts, nbytes) - 1
        return self._starts[place] + (nbytes - self._firsts[place]) / self._rate
