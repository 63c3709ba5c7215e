"""Which rank this process is, for a mesh: what the world says, else what the launcher says."""

from __future__ import annotations

from hp_platform import _process


def find_place() -> tuple[int | None, int | None]:
    """(rank, world size) of this process; (None, None) if neither a world nor a launcher says. No communication."""
    world = _process.state.world
    if world is not None:
        return world.rank, world.size
    from hp_platform import launch

    environment = launch.environment()
    if environment is None:
        return None, None
    return environment.rank, environment.world_size


def rank_for(ranks: tuple[int, ...], found: int | None) -> int:
    """The rank to make a mesh of ``ranks`` for. RuntimeError if it is unknown and could be more than one.

    Without launcher and world a program is one process, as :func:`hp_platform.init_process_group` has it too.
    """
    if found is None and ranks != (0,):
        raise RuntimeError(
            f"no rank information: a mesh of {len(ranks)} rank(s) {shown(ranks)} cannot tell which of them this process is. "
            f"Start the program with torchrun, msrun or hp_platform.launch.spawn, or call init_process_group() first"
        )
    return 0 if found is None else found


def shown(ranks: tuple[int, ...]) -> str:
    """Ranks in messages: short, also for thousands."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    if len(ranks) > 8:
        return f"[{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]}]"
    return f"[{', '.join(map(str, ranks))}]"
