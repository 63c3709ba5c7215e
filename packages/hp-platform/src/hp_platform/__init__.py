"""hp-platform: what a framework must offer, and what can be written once above it.

Read in this order: :mod:`protocols` (the primitives), :mod:`platform` (which framework), :mod:`group`, :mod:`process_groups`
and :mod:`subgroups`, :mod:`collectives` (with :mod:`recording` and :mod:`diagnosis`), :mod:`mesh`, :mod:`draws` and
:mod:`random_stream`, :mod:`launch`, :mod:`testing`.
Importing this package imports no framework.
"""

from typing import TYPE_CHECKING

from hp_platform.__about__ import __version__ as __version__
from hp_platform.lazy import attach

if TYPE_CHECKING:
    from hp_platform import collectives as collectives
    from hp_platform import launch as launch
    from hp_platform.capabilities import CAPABILITIES as CAPABILITIES
    from hp_platform.collectives import CollectiveTimeoutError as CollectiveTimeoutError
    from hp_platform.collectives import Work as Work
    from hp_platform.group import ProcessGroup as ProcessGroup
    from hp_platform.mesh import DeviceMesh as DeviceMesh
    from hp_platform.mesh import get_current_mesh as get_current_mesh
    from hp_platform.mesh import init_device_mesh as init_device_mesh
    from hp_platform.platform import Platform as Platform
    from hp_platform.platform import PlatformType as PlatformType
    from hp_platform.platform import get_platform as get_platform
    from hp_platform.platform import require as require
    from hp_platform.process_groups import destroy_process_group as destroy_process_group
    from hp_platform.process_groups import get_backend as get_backend
    from hp_platform.process_groups import get_group_local_rank as get_group_local_rank
    from hp_platform.process_groups import get_process_group_ranks as get_process_group_ranks
    from hp_platform.process_groups import get_rank as get_rank
    from hp_platform.process_groups import get_world as get_world
    from hp_platform.process_groups import get_world_size as get_world_size
    from hp_platform.process_groups import init_process_group as init_process_group
    from hp_platform.process_groups import is_initialized as is_initialized
    from hp_platform.random_stream import RandomStream as RandomStream
    from hp_platform.random_stream import default_random_stream as default_random_stream
    from hp_platform.recording import CollectiveRecord as CollectiveRecord
    from hp_platform.recording import record_collectives as record_collectives
    from hp_platform.subgroups import create_group as create_group
    from hp_platform.subgroups import group_of as group_of
    from hp_platform.subgroups import mark_created_groups as mark_created_groups
    from hp_platform.subgroups import split_group as split_group

_WHERE = {
    "CAPABILITIES": "capabilities",
    "CollectiveRecord": "recording",
    "CollectiveTimeoutError": "collectives",
    "DeviceMesh": "mesh",
    "Platform": "platform",
    "PlatformType": "platform",
    "ProcessGroup": "group",
    "RandomStream": "random_stream",
    "Work": "collectives",
    "collectives": ".",
    "create_group": "subgroups",
    "default_random_stream": "random_stream",
    "destroy_process_group": "process_groups",
    "get_backend": "process_groups",
    "get_current_mesh": "mesh",
    "get_group_local_rank": "process_groups",
    "get_platform": "platform",
    "get_process_group_ranks": "process_groups",
    "get_rank": "process_groups",
    "get_world": "process_groups",
    "get_world_size": "process_groups",
    "group_of": "subgroups",
    "init_device_mesh": "mesh",
    "init_process_group": "process_groups",
    "is_initialized": "process_groups",
    "launch": ".",
    "mark_created_groups": "subgroups",
    "record_collectives": "recording",
    "require": "platform",
    "split_group": "subgroups",
}

__getattr__, __dir__, __all__ = attach(__name__, _WHERE)
