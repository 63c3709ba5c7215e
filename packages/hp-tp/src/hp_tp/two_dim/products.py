"""The three products of a linear layer whose operands are cut over both dims of a mesh, each the derivative of the others.

With matrices A ``(M, P)``, B ``(M, Q)`` and V ``(P, Q)``: A and B cut over ``(tp_r, tp_c)`` along (rows, columns), V cut over
tp_r along P and over tp_c along Q. P is the dim that moves, panel by panel (:mod:`hp_tp.two_dim.panels`); B stays where it is:

===========  ============  ====================================  ==========================
function     computes      over tp_c                             over tp_r
===========  ============  ====================================  ==========================
``spread``   ``B = A V``   all-gather of A's panel               all-gather of V's panel
``collect``  ``A = B V'``  reduce-scatter of A's panel           all-gather of V's panel
``weigh``    ``V = A' B``  all-gather of A's panel               reduce-scatter of V's panel
===========  ============  ====================================  ==========================

Every product moves A's rows (``m x P`` elements, m rows of this rank) over tp_c and V's columns (``P x q``, q columns of this
rank) over tp_r. The derivatives of each are the two others, so derivatives of every order are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hp_dtensor import transport
from hp_dtensor.transport import Pending
from hp_platform import get_platform
from hp_platform.on_platform import once
from hp_tp.two_dim.panels import Panel, Side

Tensor = Any
Panels = tuple[Panel, ...]


def spread(a: Tensor, v: Tensor, panels: Panels) -> Tensor:
    """``B = A V``: this rank's ``(m, q)`` of its ``a (m, p_c)`` and ``v (p_r, q)``. Differentiable.

    Sums of 16-bit floats over panels are kept in float32 and rounded once.
    """
    return _functions().Spread.apply(a, v, panels)


def collect(b: Tensor, v: Tensor, panels: Panels) -> Tensor:
    """``A = B V'``: this rank's ``(m, p_c)`` of its ``b (m, q)`` and ``v (p_r, q)``. Differentiable."""
    return _functions().Collect.apply(b, v, panels)


def weigh(a: Tensor, b: Tensor, panels: Panels) -> Tensor:
    """``V = A' B``: this rank's ``(p_r, q)`` of its ``a (m, p_c)`` and ``b (m, q)``. Differentiable."""
    return _functions().Weigh.apply(a, b, panels)


# --------------------------------------------------------------------------------------------------------------- the loops
# [Note: in flight] The gathers of the next panel are started before the product of this one, and a panel's reduce-scatter is
# waited for when the next one's product is done. So beside its own blocks a rank holds two panels of each moving operand.
def _spread(a: Tensor, v: Tensor, panels: Panels) -> Tensor:
    platform = get_platform()
    turned = platform.transpose(a, 0, 1)
    is_half = platform.itemsize(a.dtype) == 2
    total = None
    starts: list[Callable[[], tuple[Pending, ...]]] = [
        lambda panel=panel: (_gather(turned, panel.activation), _gather(v, panel.weight))  # type: ignore[misc]
        for panel in panels
    ]
    for rows, weight in _one_ahead(starts):
        left = platform.transpose(rows, 0, 1)
        if total is not None and not is_half:
            total = platform.matmul_into(total, left, weight, add=total)
            continue
        product = platform.matmul_in(left, weight, "float32") if is_half else platform.matmul(left, weight)
        total = product if total is None else platform.add_(total, product)
    if total is None:
        return platform.zeros((a.shape[0], v.shape[1]), a.dtype, platform.device_of(a))
    return platform.cast(total, a.dtype)


def _collect(b: Tensor, v: Tensor, panels: Panels) -> Tensor:
    platform = get_platform()
    turned = platform.transpose(b, 0, 1)
    starts = [lambda panel=panel: (_gather(v, panel.weight),) for panel in panels]
    scattered = _scattered(
        (
            (platform.matmul(weight, turned), panel.activation)
            for (weight,), panel in zip(_one_ahead(starts), panels, strict=True)
        ),
        b.shape[0],
        b,
    )
    return platform.contiguous(platform.transpose(scattered, 0, 1))


def _weigh(a: Tensor, b: Tensor, panels: Panels) -> Tensor:
    platform = get_platform()
    turned = platform.transpose(a, 0, 1)
    starts = [lambda panel=panel: (_gather(turned, panel.activation),) for panel in panels]
    return _scattered(
        (
            (platform.matmul(rows, b), panel.weight)
            for (rows,), panel in zip(_one_ahead(starts), panels, strict=True)
        ),
        b.shape[1],
        b,
    )


def _one_ahead(starts: Sequence[Callable[[], tuple[Pending, ...]]]) -> Any:
    """The results of each start, the next one being started before a result is handed out."""
    ahead = starts[0]() if starts else ()
    for i in range(len(starts)):
        now = ahead
        ahead = starts[i + 1]() if i + 1 < len(starts) else ()
        yield tuple(pending.wait() for pending in now)


def _gather(x: Tensor, side: Side) -> Any:
    """All ranks' rows of the panel, ``(panel, n)``, of this rank's ``x``, whose rows are cut."""
    platform = get_platform()
    rows = [platform.narrow(x, 0, start, length) for start, length in side.runs]
    if len(rows) == 1:
        mine = platform.contiguous(rows[0])
    else:
        mine = platform.cat(rows) if rows else platform.contiguous(platform.narrow(x, 0, 0, 0))
    if len(side.cut.sizes) == 1:
        return _Here(mine)
    return transport.gather(mine, side.cut, async_op=True)


class _Here:
    """What needs no communication."""

    __slots__ = ("_value",)

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def wait(self) -> Tensor:
        return self._value


def _scattered(parts: Any, width: int, like: Tensor) -> Tensor:
    """The sums over ranks of panels ``(panel, width)``, of which this rank gets its rows, in their order."""
    platform = get_platform()
    pieces: list[tuple[int, Tensor]] = []
    under_way: tuple[Side, Any] | None = None
    for part, side in parts:
        if under_way is not None:
            _take(pieces, *under_way)
        is_alone = len(side.cut.sizes) == 1
        under_way = (
            side,
            _Here(part) if is_alone else transport.reduce_scatter(part, side.cut, async_op=True),
        )
    if under_way is not None:
        _take(pieces, *under_way)
    rows = [piece for _, piece in sorted(pieces, key=lambda found: found[0])]
    if not rows:
        return platform.zeros((0, width), like.dtype, platform.device_of(like))
    return rows[0] if len(rows) == 1 else platform.cat(rows)


def _take(pieces: list[tuple[int, Tensor]], side: Side, pending: Any) -> None:
    """A panel's rows have arrived: they are noted by where their runs begin."""
    arrived = pending.wait()
    if side.runs:
        of_runs = get_platform().split(arrived, [length for _, length in side.runs])
        pieces.extend((start, rows) for (start, _), rows in zip(side.runs, of_runs, strict=True))


# ----------------------------------------------------------------------------------------------------------- derivatives
@once
def _functions(platform: Any) -> SimpleNamespace:
    base: Any = platform.Function

    class Spread(base):
        @staticmethod
        def forward(ctx: Any, a: Tensor, v: Tensor, panels: Panels) -> Tensor:
            ctx.panels = panels
            ctx.save_for_backward(a, v)
            return _spread(platform.detach(a), platform.detach(v), panels)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            a, v = ctx.saved_tensors
            wanted = ctx.needs_input_grad
            return (
                Collect.apply(g, v, ctx.panels) if wanted[0] else None,
                Weigh.apply(a, g, ctx.panels) if wanted[1] else None,
                None,
            )

    class Collect(base):
        @staticmethod
        def forward(ctx: Any, b: Tensor, v: Tensor, panels: Panels) -> Tensor:
            ctx.panels = panels
            ctx.save_for_backward(b, v)
            return _collect(platform.detach(b), platform.detach(v), panels)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            b, v = ctx.saved_tensors
            wanted = ctx.needs_input_grad
            return (
                Spread.apply(g, v, ctx.panels) if wanted[0] else None,
                Weigh.apply(g, b, ctx.panels) if wanted[1] else None,
                None,
            )

    class Weigh(base):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, panels: Panels) -> Tensor:
            ctx.panels = panels
            ctx.save_for_backward(a, b)
            return _weigh(platform.detach(a), platform.detach(b), panels)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            a, b = ctx.saved_tensors
            wanted = ctx.needs_input_grad
            return (
                Collect.apply(b, g, ctx.panels) if wanted[0] else None,
                Spread.apply(a, g, ctx.panels) if wanted[1] else None,
                None,
            )

    return SimpleNamespace(Spread=Spread, Collect=Collect, Weigh=Weigh)
