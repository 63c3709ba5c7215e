"""The form in which tensors travel: their backend moves and reduces some dtypes only.

[Note: bytes] Backends move fewer dtypes than torch has. Where only data moves, a tensor of another dtype travels as its bytes, a
view with one more dim at the end, so that dim 0 stays what it is.

[Note: complex numbers] No backend reduces them. Their sum and mean are those of the real and the imaginary parts, a view with one more dim
at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hp_platform.torch._ordered import of_ordered, ordered
from hp_platform.torch.device import TorchDevice

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class TorchWire:
    """What launches ask of the backend of their tensors' device."""

    _devices: dict[str, TorchDevice]

    def _reducible(
        self, xs: Sequence[torch.Tensor], op: str
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None] | None]:
        """The tensors (of one dtype) in a form that the backend reduces, and what copies them back (None if they are the same).

        See [Note: NaN on the way] in hp_platform.torch._ordered.
        """
        xs = [plain(x) for x in xs]
        if xs[0].dtype.is_complex:  # see [Note: complex numbers]
            xs = [torch.view_as_real(x) for x in xs]
        facts, dtype = self._devices[xs[0].device.type].comm, xs[0].dtype
        is_ordered = facts.loses_nan and op in ("max", "min") and dtype.is_floating_point
        if not is_ordered and dtype not in facts.widened:
            return xs, None
        sent = [ordered(x, op) for x in xs] if is_ordered else xs
        wide = facts.widened.get(sent[0].dtype, sent[0].dtype)
        sent = [x.to(wide) for x in sent]

        def finish() -> None:
            for x, y in zip(xs, sent, strict=True):
                x.copy_(of_ordered(y, dtype) if is_ordered else y)

        return sent, finish

    def _movable(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in a dtype that its backend moves. See [Note: bytes]."""
        x = plain(x)
        if x.dtype in self._devices[x.device.type].comm.movable:
            return x
        return x.unsqueeze(-1).view(torch.uint8)


def plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` outside of the graph: a launch writes into tensors, and records nothing."""
    return x.detach() if x.requires_grad else x
