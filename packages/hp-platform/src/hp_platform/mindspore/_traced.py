"""Collectives in compiled code: there are none, since modules run in PyNative mode."""

from __future__ import annotations

from typing import Any, NoReturn


class MindSporeTracedOps:
    """Refuses the traced collectives of :class:`hp_platform.protocols.CommOps`."""

    def traced_name(self, group: Any) -> NoReturn:
        """Refused."""
        _refuse()

    def traced_all_reduce(self, x: Any, group: str) -> NoReturn:
        """Refused."""
        _refuse()

    def traced_all_gather(self, x: Any, size: int, group: str) -> NoReturn:
        """Refused."""
        _refuse()

    def traced_reduce_scatter(self, x: Any, size: int, group: str) -> NoReturn:
        """Refused."""
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "MindSpore records no collectives in compiled code: ask supports('traced_collectives'), and use hp_platform.collectives"
    )
