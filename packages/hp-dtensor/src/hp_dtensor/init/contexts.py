"""Blocks in which parameters are made without memory, or on another device."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

from hp_platform import get_platform


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[None]:
    """Parameters of modules that are built inside have shape and dtype, but no memory: they are on the meta device.

    Shard the model then, and call :func:`init_parameters`. With ``include_buffers`` everything that is built inside is on
    meta. Without it a parameter that its module makes by ``torch.empty`` still takes no memory; one that is computed exists
    in full until it is registered, one at a time. Not for several threads at once.

    On MindSpore a parameter that its cell makes by an initializer takes no memory, and neither is it filled: the cell keeps the
    initializer. Parameters in plain lists are not registered, so nothing can initialise them: MindSpore refuses to use them.
    """
    return init_on_device("meta", include_buffers)


def init_on_device(device: Any, include_buffers: bool = False) -> AbstractContextManager[None]:
    """Parameters of modules that are built inside go to ``device`` (a name, or the framework's object) as they are registered.

    With ``include_buffers`` everything that is built inside is made there; on MindSpore buffers go there as they are
    registered. Blocks may be nested: the inner one counts. Not for several threads at once. ValueError for what is no device.
    """
    if not isinstance(include_buffers, bool):
        raise ValueError(f"include_buffers must be True or False, got {include_buffers!r}")
    block: AbstractContextManager[None] = adapter().registering_on(device, include_buffers)
    return block


def adapter() -> Any:
    """What only the framework can do: the module ``init`` of ``hp_dtensor._torch`` or ``hp_dtensor._mindspore``."""
    return importlib.import_module(f"hp_dtensor._{get_platform().platform_type.value}.init")
