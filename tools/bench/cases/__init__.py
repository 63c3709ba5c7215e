"""The cases. A case is defined in a module of this folder, and listed here by the name it is run by.

Modules import torch and our packages inside the sides they build, so that `--list` needs neither.
"""

from bench.case import Case
from bench.cases import (
    checkpoint,
    dropout,
    dtensor,
    dtensor_asynchronous,
    dtensor_layer,
    dtensor_redistribution,
    fsdp_host,
    platform_calls,
    tp_host,
)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *platform_calls.CASES,
        *dtensor.CASES,
        *dtensor_redistribution.CASES,
        *dtensor_asynchronous.CASES,
        *dtensor_layer.CASES,
        *dropout.CASES,
        *checkpoint.CASES,
        *fsdp_host.CASES,
        *tp_host.CASES,
    )
}
