"""Errors where they happen, and one thread: what tests want of MindSpore."""

from __future__ import annotations

import mindspore


def launch_blocking() -> None:
    """Let every operation of this process finish, or fail, before the next line runs. Slower; for tests and for debugging.

    By itself MindSpore reports a missing kernel at a later read, even of an unrelated tensor.
    """
    mindspore.runtime.launch_blocking()


def use_one_thread() -> None:
    """Let kernels on a CPU use no threads beside their caller's; once per process, before its first kernel.

    Idle threads spin for a while after each kernel, on cores that other ranks need. RuntimeError for a second call.
    """
    mindspore.device_context.cpu.op_tuning.threads_num(1)
