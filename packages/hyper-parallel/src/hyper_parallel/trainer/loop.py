"""The run of one process: build, shard, train, save. Read :func:`run` first; it is the recipe."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hp_platform
from hp_fsdp import (
    MixedPrecisionPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    set_model_state_dict,
)
from hp_platform import collectives, get_platform, init_device_mesh
from hyper_parallel.trainer import checkpoint, results
from hyper_parallel.trainer.data import Corpus, batch, load_corpus, validation_batch
from hyper_parallel.trainer.generate import generate, printable
from hyper_parallel.trainer.optimizer import make_optimizer, make_schedule
from hyper_parallel.trainer.options import Options
from hyper_parallel.trainer.report import BITS_PER_NAT, Report, draw_loss
from hyper_parallel.trainer.sizes import check_fits

GENERATED_BYTES = 200


@dataclass(frozen=True)
class Summary:
    """What a run gives back to the command."""

    losses: list[float]
    """Global mean loss of every step of this run, nats per byte."""
    bits_before: float
    bits_after: float
    seconds: float


def run(options: Options) -> Summary:
    """Train, in one of ``options.nproc`` processes that all call this."""
    platform = get_platform()
    if not hp_platform.is_initialized():
        hp_platform.init_process_group(
            device_id=None if options.device == "cpu" else platform.device(options.device).current()
        )
    world = hp_platform.get_world()
    if options.device != "cpu":
        check_fits(options, platform.device(options.device).memory_info()[1])
    job = _Job(options, load_corpus(options.data, options.size.length))
    root = Path(options.out)
    first_step = job.resume(root) if options.resume else 0

    before = job.validate()
    losses: list[float] = []
    started = time.perf_counter()
    report = Report(root, options.steps, first_step) if world.rank == 0 else None
    with report or _Silent() as shown:
        if first_step == 0:
            shown.say(
                f"{job.num_parameters:,} parameters, {world.size} process(es) on {options.device}, {options.dtype}; {job.corpus.source}"
            )
        shown.say(f"validation before: {before:.3f} bits per byte")
        for step in range(first_step, options.steps):
            begun = time.perf_counter()
            lr = job.schedule.get_last_lr()[0]
            losses.append(job.train_step(step))
            shown.step(
                step + 1,
                loss=losses[-1],
                tokens_per_second=options.batch * options.size.length / (time.perf_counter() - begun),
                memory=platform.device(options.device).max_memory_allocated(),
                lr=lr,
            )
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                job.save(root, step + 1)
        after = job.validate()
        shown.say(f"validation after:  {after:.3f} bits per byte")
    job.export(root / results.MODEL)
    text = generate(
        job.model,
        b"The ",
        count=GENERATED_BYTES,
        length=options.size.length,
        seed=options.seed,
        device=job.device,
    )
    if world.rank == 0:
        draw_loss(
            root,
            first_step=first_step,
            before=before,
            after=after,
            title=f"{job.num_parameters:,} parameters, {world.size} process(es)",
        )
        print(f"generated: {printable(text)}", flush=True)
    collectives.barrier()
    return Summary(losses, before, after, time.perf_counter() - started)


class _Job:
    """Model, optimizer and data of one run."""

    def __init__(self, options: Options, corpus: Corpus) -> None:
        # The model's classes inherit from the framework's, so they are imported when the framework is chosen.
        from hyper_parallel.trainer.model import Decoder, loss_of

        self.options, self.corpus, self._loss_of = options, corpus, loss_of
        platform = self.platform = get_platform()
        self.world = hp_platform.get_world()
        self.device = platform.device(options.device).current()
        half = options.dtype in ("bfloat16", "float16")
        parameter_dtype = "float32" if half else options.dtype
        model = Decoder(options.size, seed=options.seed, dtype=parameter_dtype, device=self.device)
        self.shapes = {name: tuple(p.shape) for name, p in platform.named_parameters(model)}
        self.num_parameters = sum(math.prod(shape) for shape in self.shapes.values())

        # The one place where sharding is said: every block is a unit, what is left is the root's.
        mesh = init_device_mesh(options.device, (self.world.size,), mesh_dim_names=("dp",))
        policy = (
            MixedPrecisionPolicy(
                param_dtype=platform.dtype(options.dtype), reduce_dtype=platform.dtype("float32")
            )
            if half
            else MixedPrecisionPolicy()
        )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = make_optimizer(self.model, options)
        self.schedule = make_schedule(self.optimizer, options)

    def _mine(self, rows: Any) -> Any:
        """This rank's rows of a global batch, as a tensor on the device."""
        size = len(rows) // self.world.size
        return self.platform.tensor(
            rows[self.world.rank * size : (self.world.rank + 1) * size], device=self.device
        )

    def _global_mean(self, loss: Any) -> float:
        """The mean over ranks; rows are equally many on each. Communication: one all-reduce of one number."""
        platform = self.platform
        wide = platform.cast(
            platform.detach(loss), "float64" if self.options.dtype == "float64" else "float32"
        )
        return float(platform.to_numpy(collectives.all_reduce(wide, op="mean")))

    def train_step(self, step: int) -> float:
        """One step; the global mean loss before the update, nats per byte."""
        options = self.options
        ids, targets = batch(
            self.corpus, seed=options.seed, step=step, size=options.batch, length=options.size.length
        )
        loss = self._loss_of(self.model, self._mine(ids), self._mine(targets))
        self.platform.backward([loss])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return self._global_mean(loss)

    def validate(self) -> float:
        """Bits per byte on the held-out text."""
        ids, targets = validation_batch(
            self.corpus, length=self.options.size.length, multiple=self.world.size
        )
        with self.platform.no_grad():
            return (
                self._global_mean(self._loss_of(self.model, self._mine(ids), self._mine(targets)))
                * BITS_PER_NAT
            )

    def save(self, root: Path, step: int) -> None:
        """A sharded checkpoint after ``step`` steps."""
        parts = {
            "model": get_model_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        checkpoint.save(root / results.CHECKPOINTS, step=step, identity=self.options.identity(), parts=parts)

    def resume(self, root: Path) -> int:
        """Load the newest checkpoint; the number of steps it has behind it. The command has checked that it fits."""
        saved = checkpoint.find(root / results.CHECKPOINTS, self.options.identity())
        parts = checkpoint.load(saved, self.optimizer.like)
        set_model_state_dict(self.model, parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.schedule.load_state_dict(parts["schedule"])
        return saved.step

    def export(self, file: Path) -> None:
        """Whole parameters as one plain safetensors file, written by rank 0. Communication: the gathers of all parameters."""
        from safetensors.numpy import save

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self.model, options=options)
        if self.world.rank == 0:
            arrays = {name: self.platform.to_numpy(whole[name]) for name in self.shapes}
            partial = file.with_suffix(".partial")
            partial.write_bytes(save(arrays))  # save_file would make a file that only its owner may read
            partial.replace(file)


class _Silent:
    """The report of the other ranks."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, step: int, **_: float) -> None:
        """Nothing."""
