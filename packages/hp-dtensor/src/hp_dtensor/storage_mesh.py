"""Meshes of tensors that are kept in pieces, and are whole and plain when something is computed with them.

[Note: kept in pieces] So does sharded data parallel training keep parameters. There every rank computes with samples of its
own, in plain tensors. If such a parameter meets one of them while it is in pieces, somebody has forgotten to make it whole;
counting the plain tensor as replicated, as elsewhere, would silently give other numbers. So these parameters lie on a
mesh object of their own, equal to the user's but another one. What operations make of them alone lies on it as well,
and the mistake is seen behind a transposition or a cast, too. It is looked for only where a plain tensor meets a DTensor.
"""

from __future__ import annotations

from typing import Any

from hp_platform import DeviceMesh

_TWIN = "storage mesh"
_ADVICE = "advice of a storage mesh"


def storage_mesh(mesh: DeviceMesh, advice: str) -> DeviceMesh:
    """The mesh for tensors on ``mesh`` that are only kept in pieces. Asked for twice with one advice, the same object. No
    communication.

    Args:
        mesh: the user's; a storage mesh is returned as it is.
        advice: ends the message of the error where a plain tensor meets such a tensor; ``{method}`` in it stands for the
            quoted name of the method that was running, or for ``name``.
    """
    if _ADVICE in mesh.interned:
        return mesh
    twin: DeviceMesh | None = mesh.interned.get((_TWIN, advice))
    if twin is None:
        twin = mesh.interned[_TWIN, advice] = mesh.twin()
        twin.interned[_ADVICE] = advice
    return twin


def advice_of(mesh: Any) -> str | None:
    """What to tell who computes with tensors on a storage mesh; None for any other mesh."""
    advice: str | None = mesh.interned.get(_ADVICE)
    return advice
