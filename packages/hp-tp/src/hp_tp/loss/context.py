"""``loss_parallel``: the block in which losses on DTensors leave cut classes cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hp_dtensor.rules.registry import Rule
from hp_dtensor.spec import Spec
from hp_platform import DeviceMesh, _process
from hp_tp.loss.rules import is_cut_along, parallel_rule

_REPLACED = frozenset({"cross_entropy", "nll_loss", "softmax"})
"""Rules that a block may replace."""


@dataclass(frozen=True)
class ParallelLosses:
    """What is asked of losses inside of a block: the value of the context variable."""

    mesh: Any
    strict: bool

    def rule_for(self, rule: Rule, function: Any) -> Rule:
        """The rule that the operation follows inside of the block."""
        return parallel_rule(rule, function, _open_block) if rule.name in _REPLACED else rule

    def __call__(self, function: str, logits: Spec, class_dim: int) -> None:
        """ValueError unless the logits of a cross-entropy are cut as the block wants them."""
        if not is_cut_along(logits, class_dim):
            raise ValueError(
                f"loss_parallel: {function} got logits that are not cut along their classes, dim {class_dim} of {logits.shape}: "
                f"{logits}. Let the last layer give Shard(-1), as ColwiseParallel(output_layouts=Shard(-1), "
                f"use_local_output=False) does, redistribute the logits, or call {function} outside of the block"
            )
        if not self.strict:
            return
        if self.mesh is not None and isinstance(logits.mesh, DeviceMesh) and logits.mesh != self.mesh:
            raise ValueError(
                f"loss_parallel(mesh={self.mesh}): {function} got logits on {logits.mesh}: give that mesh, or strict=False to "
                f"take logits of any mesh"
            )
        if self.mesh is None and len(logits.mesh.shape) > 1:
            raise ValueError(
                f"loss_parallel: {function} got logits {logits}, on a mesh of {len(logits.mesh.shape)} dims, one of which cuts the "
                f"classes: give that mesh, loss_parallel(mesh=mesh), or strict=False"
            )


def _open_block() -> ParallelLosses:
    found: ParallelLosses = _process.parallel_losses.get()
    return found


@contextmanager
def loss_parallel(*, mesh: Any = None, strict: bool = True) -> Iterator[None]:
    """Inside, losses on DTensors whose classes are cut work on the pieces: no rank gets the logits of all classes.

    ::

        with loss_parallel():
            logits = model(tokens)  # a DTensor, Shard(-1): (batch * length, vocabulary)
            loss = torch.nn.functional.cross_entropy(logits, targets)
            loss.backward()

    The framework's own functions are meant, also as modules (``nn.CrossEntropyLoss``), on logits ``(n, classes)``, ``(classes,)`` or
    ``(n, classes, d1, ...)``. Values and gradients are those of one process with the whole logits, for every ``reduction``,
    ``ignore_index``, class ``weight`` (Replicate, or cut as the classes are) and ``label_smoothing``; the number of classes need
    not divide by the number of ranks, and a rank may have none. Rows may be cut over other mesh dims.

    - ``cross_entropy``: one all-reduce (max) of a number per row, one (sum) of 2 numbers per row, 3 with smoothing, one more with
      cut weights; on cuda with Triton, for logits ``(n, classes)`` of 16 or 32 bits, one all-gather of 3 numbers per row instead (one more
      with smoothing, one with weights, one with both), and one pass over the logits each way. A mean over rows that are cut,
      too, one of a number. Backward: none. Memory until backward: the logits in their own dtype, and a few numbers per row.
    - ``log_softmax`` along a cut dim: two all-reduces of a number per row, in backward one; its result stays cut.
    - ``nll_loss`` of that: one all-reduce of a number per row, in backward none.

    (MindSpore's ``cross_entropy`` is made of the latter two.) The result is Replicate along mesh dims that cut classes; a
    reduced one is a Partial along those that cut rows. Outside of the block the same functions give the same numbers, but
    there the logits travel. Backward may run inside or outside; other operations are as outside.

    Blocks may be nested, the innermost counts; one holds for this thread and asynchronous task only.

    Args:
        mesh: the mesh on which logits must lie. None: any mesh of one dim.
        strict: False: any mesh, also of several dims.

    ValueError if ``mesh`` is no mesh; from ``cross_entropy`` inside for logits that are not cut along their classes, or (strict) on
    another mesh, for targets that are probabilities, and weights that require a gradient. Entering communicates nothing.
    Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; torch.distributed.tensor.parallel.loss_parallel.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"loss_parallel: mesh is a hp_platform.DeviceMesh, got {type(mesh).__name__}; make one with init_device_mesh, or leave "
            f"it out"
        )
    token = _process.parallel_losses.set(ParallelLosses(mesh, bool(strict)))
    _process.open_modes.add(1)
    try:
        yield
    finally:
        _process.open_modes.add(-1)
        _process.parallel_losses.reset(token)
