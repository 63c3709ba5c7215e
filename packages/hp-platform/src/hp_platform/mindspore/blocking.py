"""Errors where they happen: what tests want of MindSpore."""

from __future__ import annotations

import mindspore


def launch_blocking() -> None:
    """Let every operation of this process finish, or fail, before the next line runs. Slower; for tests and for debugging.

    By itself MindSpore reports a missing kernel at a later read, even of an unrelated tensor.
    """
    mindspore.runtime.launch_blocking()
