"""Values written into a whole tensor."""

from __future__ import annotations

from typing import Any

from hp_dtensor._mindspore.spelling import Operation, spelling
from hp_dtensor.errors import no_rule
from hp_dtensor.rng.places import is_dtensor
from hp_platform import get_platform


@spelling("copy_", "Assign")
def _assign(operation: Operation, x: Any, value: Any) -> Any:
    """MindSpore records no assignment, so none is recorded here. A plain parameter takes no DTensor."""
    if not is_dtensor(x):
        raise no_rule(operation.name, [value._spec])
    with get_platform().no_grad():
        return x.copy_(value)
