"""Which rank this process is, as its launcher has said in environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_TORCHRUN_PORT = 29500
DEFAULT_MSRUN_PORT = 8118
"""The ports that the two launchers take themselves if they are told none."""

LAUNCH_VARIABLES = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
        "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_ROLE",
        "MS_WORKER_NUM", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    }
)  # fmt: skip
"""All variables that say something about a job. Whoever starts a new job inside of one clears them first."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process in its job. All ranks count from 0."""

    launcher: Literal["torchrun", "msrun"]
    """Whose variables were read; :func:`hp_platform.launch.spawn` sets torchrun's."""
    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of this host: which of its devices to use."""
    local_world_size: int | None
    """Number of processes of this host; None if the launcher does not say (msrun)."""
    master_addr: str
    """Host of rank 0 (torchrun) or of the scheduler (msrun)."""
    master_port: int


def environment(variables: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
    """What the launcher says of this process; None if no launcher has started it.

    torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; msrun
    sets ``MS_WORKER_NUM``, ``RANK_ID`` (or ``MS_NODE_ID``), ``DEVICE_ID``, ``MS_SCHED_HOST`` and ``MS_SCHED_PORT``. If both
    are there, torchrun's count. ``variables`` defaults to :data:`os.environ`. ``local_rank`` defaults to the rank (one
    host), the address to 127.0.0.1, the port to the launcher's own default. Communication: none.

    Raises ValueError for half a set of variables, and for values that are no numbers or contradict each other.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env or "WORLD_SIZE" in env:
        return _checked(
            "torchrun",
            env,
            names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            default_port=DEFAULT_TORCHRUN_PORT,
        )
    if "MS_WORKER_NUM" in env and env.get("MS_ROLE", "MS_WORKER") == "MS_WORKER":
        rank = "RANK_ID" if "RANK_ID" in env else "MS_NODE_ID"
        return _checked(
            "msrun",
            env,
            names=(rank, "MS_WORKER_NUM", "DEVICE_ID", None, "MS_SCHED_HOST", "MS_SCHED_PORT"),
            default_port=DEFAULT_MSRUN_PORT,
        )
    return None


def _checked(
    launcher: Literal["torchrun", "msrun"],
    env: Mapping[str, str],
    *,
    names: tuple[str, str, str, str | None, str, str],
    default_port: int,
) -> LaunchEnvironment:
    rank_name, size_name, local_name, local_size_name, host_name, port_name = names
    rank = _integer(env, rank_name, launcher)
    size = _integer(env, size_name, launcher)
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} and {size_name}={size}: the rank must be in 0 ... {size - 1}")
    local_rank = _integer(env, local_name, launcher, default=rank)
    if local_rank < 0:
        raise ValueError(f"{local_name}={local_rank}: the rank on this host must be 0 or more")
    local_size: int | None = None
    if local_size_name is not None and local_size_name in env:
        local_size = _integer(env, local_size_name, launcher)
        if not local_rank < local_size <= size:
            raise ValueError(
                f"{local_name}={local_rank}, {local_size_name}={local_size} and {size_name}={size}: the rank on this host "
                f"must be below the number of processes of this host, which is at most that of all"
            )
    return LaunchEnvironment(
        launcher=launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        master_addr=env.get(host_name) or DEFAULT_ADDRESS,
        master_port=_integer(env, port_name, launcher, default=default_port),
    )


def _integer(env: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    text = env.get(name, "").strip()
    if not text:
        if default is None:
            raise ValueError(
                f"{name} is not set, but other variables of {launcher} are: start all processes with {launcher} or "
                f"hp_platform.launch.spawn, or set {name} too"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no whole number") from None
