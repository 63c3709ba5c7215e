"""What a run shows: a bar on a terminal (lines elsewhere), ``metrics.jsonl``, ``loss.png``. Rank 0 only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hyper_parallel.trainer.results import METRICS, PICTURE

BITS_PER_NAT = 1 / math.log(2)


class Report:
    """Opened by rank 0 for the time of training; :meth:`step` after every step."""

    def __init__(self, folder: Path, steps: int, first_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._folder, self._steps = folder, steps
        self._console = Console()
        self._every = max(1, (steps - first_step) // 10)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s  {task.fields[memory]:,.0f} MiB"
            ),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            "training", total=steps, completed=first_step, loss=math.nan, rate=0.0, memory=0.0
        )
        self._file = _metrics_up_to(first_step, folder / METRICS)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._file.close()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, *, loss: float, tokens_per_second: float, memory: int, lr: float) -> None:
        """``step`` counts from 1; loss in nats per byte, memory in bytes on this rank."""
        row = {
            "step": step,
            "loss": loss,
            "tokens_per_second": round(tokens_per_second, 1),
            "memory_bytes": memory,
            "lr": lr,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        mebibytes = memory / 2**20
        self._progress.update(self._task, completed=step, loss=loss, rate=tokens_per_second, memory=mebibytes)
        if not self._console.is_terminal and (step % self._every == 0 or step == self._steps):
            self.say(
                f"step {step}/{self._steps}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {mebibytes:,.0f} MiB"
            )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def _metrics_up_to(step: int, file: Path) -> TextIO:
    """The file, open for the rows after ``step``: what a killed run wrote after its last checkpoint is done again."""
    lines = file.read_text(errors="replace").splitlines() if step and file.exists() else []
    kept = [row for row in map(_row, lines) if row is not None and row["step"] <= step]
    opened = file.open("w")
    opened.writelines(json.dumps(row) + "\n" for row in kept)
    return opened


def _row(line: str) -> dict[str, Any] | None:
    """None for what is no row: a killed run may leave half a line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def draw_loss(folder: Path, *, first_step: int, before: float, after: float, title: str) -> None:
    """``loss.png`` from ``metrics.jsonl``: bits per byte over steps; validation at ``first_step``, where this run began, and its end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(folder)
    steps, bits = [row["step"] for row in rows], [row["loss"] * BITS_PER_NAT for row in rows]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, bits, color="tab:blue", linewidth=1.2, label="training")
    axes.plot(
        [first_step, steps[-1]],
        [before, after],
        "o",
        color="tab:orange",
        label="validation, before and after this run",
    )
    for x, y, place in ((first_step, before, (-8, -4)), (steps[-1], after, (-6, -16))):
        axes.annotate(
            f"{y:.2f}",
            (x, y),
            textcoords="offset points",
            xytext=place,
            ha="right",
        )
    top = max(
        (y for y in (before, *bits) if math.isfinite(y)), default=8.0
    )  # a run that diverged has a curve too
    axes.set(xlabel="step", ylabel="bits per byte", title=title, ylim=(0, 1.1 * top))
    axes.margins(x=0.08)  # room for the first number, left of its point
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(folder / PICTURE, dpi=120)
    plt.close(figure)
