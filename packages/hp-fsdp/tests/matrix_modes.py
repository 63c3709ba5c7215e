"""A program in one of the modes: on which mesh, what ``fully_shard`` is told, and which piece of a parameter lies here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from fsdp_models import LEARNING_RATE, Maker, local
from matrix_cases import Case
from matrix_programs import PROGRAMS, MatrixProgram

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_fsdp import CPUOffloadPolicy, HSDPModule, MixedPrecisionPolicy, fully_shard
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World


def chunk_of(n: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Begin and end of a piece, as torch.chunk cuts."""
    length = -(-n // num_chunks)
    return min(index * length, n), min((index + 1) * length, n)


def piece_of(whole: np.ndarray, dim: int | None, num_chunks: int, index: int) -> np.ndarray:
    if dim is None:
        return whole
    start, end = chunk_of(whole.shape[dim], num_chunks, index)
    return whole[(slice(None),) * dim + (slice(start, end),)]


@dataclass(frozen=True)
class Grid:
    """How the ranks of a world are laid out in a mode, and where this one stands."""

    mesh: DeviceMesh
    """With the dims ``replicas``, ``shards`` and ``tp``, those of the mode."""
    has_replicas: bool
    has_tp: bool

    @property
    def names(self) -> tuple[str, ...]:
        return ("replicas", "shards") if self.has_replicas else ("shards",)

    @property
    def data(self) -> DeviceMesh:
        """What ``fully_shard`` gets."""
        return self.mesh[self.names]

    @property
    def num_shards(self) -> int:
        return self.mesh.size("shards")

    @property
    def num_replicas(self) -> int:
        return self.mesh.size("replicas") if self.has_replicas else 1

    @property
    def shard_rank(self) -> int:
        return self.mesh.get_local_rank("shards")

    @property
    def data_rank(self) -> int:
        """Whose samples this rank sees."""
        replica = self.mesh.get_local_rank("replicas") if self.has_replicas else 0
        return replica * self.num_shards + self.shard_rank

    @property
    def num_data(self) -> int:
        return self.num_replicas * self.num_shards

    @property
    def num_tp(self) -> int:
        return self.mesh.size("tp") if self.has_tp else 1

    @property
    def tp_rank(self) -> int:
        return self.mesh.get_local_rank("tp") if self.has_tp else 0


def make_grid(world: World, mode: str) -> Grid:
    has_tp = mode.startswith("unified")
    tp = 2 if has_tp and world.size % 2 == 0 else 1
    data = world.size // tp
    replicas = {"hsdp": 2 if data % 2 == 0 else 1, "ddp": data, "unified hsdp": 1 if data == 1 else 2}.get(
        mode
    )
    if mode == "unified hsdp" and data % 2:
        replicas = data  # three ranks: (3, 1, 1)
    sizes, names = [data // (replicas or 1)], ["shards"]
    if replicas is not None:
        sizes, names = [replicas, *sizes], ["replicas", *names]
    if has_tp:
        sizes, names = [*sizes, tp], [*names, "tp"]
    mesh = init_device_mesh(world.device_type, tuple(sizes), mesh_dim_names=tuple(names))
    return Grid(mesh, replicas is not None, has_tp)


class Sharded:
    """The model of a case, sharded."""

    def __init__(self, world: World, case: Case, low: str, *, is_sharded: bool = True) -> None:
        self.world, self.case, self.platform = world, case, world.platform
        self.program: MatrixProgram = PROGRAMS[case.program]
        self.grid = make_grid(world, case.mode)
        self.is_compat = case.mode == "compat"
        self.maker = Maker(world)
        self.model = self.program.build(Maker(world))
        platform = self.platform
        before = dict(platform.named_parameters(self.model))
        self.shapes = {name: tuple(p.shape) for name, p in before.items()}
        self.trains = {name: platform.requires_grad(p) for name, p in before.items()}
        self.tp_dims = {name: self._tp_dim(at, shape) for at, (name, shape) in enumerate(self.shapes.items())}
        self.cut_dims = {name: self._cut_dim(name, shape) for name, shape in self.shapes.items()}
        if self.grid.has_tp or self.is_compat:
            self._distribute()
        self.reshard = self._reshard()
        self.num_parts = 1 if case.accumulate == "no" else 2
        """Micro-batches of a step."""
        self.is_sharded = is_sharded
        if is_sharded:
            self._fully_shard(low)
            self._tell()

    # --- before fully_shard
    def _tp_dim(self, at: int, shape: tuple[int, ...]) -> int | None:
        """Matrices are cut along rows and columns in turn, vectors whole and cut in turn."""
        if self.is_compat or self.grid.has_tp:
            return (at // 2) % 2 if len(shape) > 1 else (0 if at % 4 == 1 else None)
        return None

    def _distribute(self) -> None:
        """Let parameters and buffers be DTensors, on the tensor-parallel ranks or (compat) on all."""
        platform, mesh = self.platform, self.mesh_of_dtensors
        made: dict[int, Any] = {}
        dims = {id(p): self.tp_dims[name] for name, p in platform.named_parameters(self.model)}
        for _, module in list(platform.named_modules(self.model)):
            for name, parameter in list(
                platform.named_parameters(module, recurse=False, remove_duplicate=False)
            ):
                if id(parameter) not in made:
                    dim = dims[id(parameter)]
                    placement = Replicate() if dim is None else Shard(dim)
                    dtensor = distribute_tensor(platform.detach(parameter), mesh, [placement])
                    flag = platform.requires_grad(parameter)
                    made[id(parameter)] = parameter, platform.parameter(dtensor, requires_grad=flag)
                platform.set_parameter(module, name, made[id(parameter)][1])
            for name, buffer in list(platform.named_buffers(module, recurse=False)):
                platform.register_buffer(module, name, distribute_tensor(buffer, mesh, [Replicate()]))

    @property
    def mesh_of_dtensors(self) -> DeviceMesh:
        return self.grid.mesh["shards" if self.is_compat else "tp"]

    # --- fully_shard
    def _cut_dim(self, name: str, shape: tuple[int, ...]) -> int | None:
        if self.case.replicate and name in self.program.replicated:
            return None
        wanted = {"first": 0, "last": len(shape) - 1, "second": 1}[self.case.cut]
        return wanted if wanted < len(shape) else 0

    def _place(self, parameter: Any) -> Any:
        ndim = len(parameter.shape)
        return {
            "first": None,
            "last": Shard(-1),
            "second": Shard(1) if ndim > 1 else None,
        }[self.case.cut]

    def _reshard(self) -> bool | int:
        """A number of ranks must divide the shards."""
        given = self.case.reshard
        return True if not isinstance(given, bool) and self.grid.num_shards % given else given

    def _fully_shard(self, low: str) -> None:
        case, platform, world = self.case, self.platform, self.world
        kwargs: dict[str, Any] = {}
        if case.precision != "wide":
            kwargs["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=low,
                reduce_dtype=self.maker.widest,
                apply_grad_on_fp32_main_grad=case.precision == "main",
            )
        if case.offload:
            kwargs["offload_policy"] = CPUOffloadPolicy()
        if case.replicate:
            by_name = dict(platform.named_parameters(self.model))
            kwargs["replicate_params"] = [by_name[name] for name in self.program.replicated]
        if case.cut != "first":
            kwargs["shard_placement_fn"] = self._place
        shares = platform.supports("write_into_view", world.device) and platform.supports(
            "alias", world.device
        )
        shares = shares and not (case.offload and world.device_type != "cpu")
        zero_copy = None if case.zero_copy and not shares else case.zero_copy
        for name in (*self.program.units, ""):
            fully_shard(
                platform.get_submodule(self.model, name),
                None if self.is_compat else self.grid.data,
                reshard_after_forward=self.reshard,
                comm_fusion=case.fusion,
                comm_fusion_zero_copy=zero_copy,
                **kwargs,
            )

    def _tell(self) -> None:
        """What is said after fully_shard."""
        case, model = self.case, self.model
        assert isinstance(model, HSDPModule)
        if case.op == "sum":
            model.set_reduce_op_type("sum")
        elif case.op == "number":
            model.set_gradient_scaling_factor(0.25)
        elif case.op == "tensor":
            model.set_gradient_scaling_factor(
                self.platform.full((1,), 0.25, self.maker.widest, self.world.device)
            )
        if not case.last:
            model.set_is_last_backward(False)
        if case.keep:
            model.set_reshard_after_backward(False)
        if case.prefetch != "auto":
            # The root begins both; then its units run one after the other, in backward from the last to the first.
            depth = 2 if case.prefetch == "lists" else 0
            units = ["", *self.program.units]
            order = [self.platform.get_submodule(model, name) for name in units]
            for at, module in enumerate(order):
                module.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + depth])
            back = [
                name for name in reversed(self.program.units) if name not in self.program.without_backward
            ]
            order = [self.platform.get_submodule(model, name) for name in ("", *back)]
            for at, module in enumerate(order):
                module.set_modules_to_backward_prefetch(order[at + 1 : at + 1 + depth])

    # --- a step
    def inputs(self, batch: int) -> Any:
        """This rank's samples; DTensors where the parameters are."""
        platform, grid = self.platform, self.grid
        mine = self.program.inputs(self.maker, grid.data_rank, batch)
        if self.is_compat:
            shape = (mine.shape[0] * grid.num_data, *mine.shape[1:])
            return DTensor.from_local(mine, self.mesh_of_dtensors, [Shard(0)], shape=shape)
        if grid.has_tp:
            return DTensor.from_local(platform.detach(mine), self.mesh_of_dtensors, [Replicate()])
        return mine

    def branch(self, data_rank: int, batch: int) -> int:
        """Which branch the samples of a rank take; compat is one program for all ranks."""
        return batch if self.is_compat else data_rank + batch

    def sync(self, part: int) -> None:
        """Say whether the micro-batch that comes is to be reduced."""
        if not self.is_sharded:
            return
        is_last = part == self.num_parts - 1
        if self.case.accumulate == "whole":
            self.model.set_requires_gradient_sync(is_last)
        elif self.case.accumulate == "shards":
            self.model.set_requires_all_reduce(is_last)

    # --- what lies here
    def expected_piece(self, name: str, whole: np.ndarray | None) -> np.ndarray | None:
        """Of this rank, cut by hand: first among tensor-parallel ranks, then among shards."""
        if whole is None:
            return None
        grid, tp_dim = self.grid, self.tp_dims[name]
        if self.is_compat:
            return piece_of(whole, tp_dim, grid.num_shards, grid.shard_rank)
        return piece_of(
            piece_of(whole, tp_dim, grid.num_tp, grid.tp_rank),
            self.cut_dims[name],
            grid.num_shards,
            grid.shard_rank,
        )

    def gradient_of(self, parameter: Any) -> Any:
        """Of a parameter, as an optimizer finds it: a DTensor, or None."""
        if self.case.precision == "main":
            assert parameter.grad is None
            return getattr(parameter, "main_grad", None)
        return parameter.grad

    def gradients(self) -> dict[str, Any]:
        """This rank's pieces of them."""
        found = {}
        for name, parameter in self.platform.named_parameters(self.model):
            gradient = self.gradient_of(parameter)
            found[name] = None if gradient is None else local(gradient)
        return found

    def step(self) -> None:
        """Stochastic gradient descent on the pieces; gradients are dropped."""
        platform = self.platform
        for _, parameter in platform.named_parameters(self.model):
            gradient = self.gradient_of(parameter)
            if gradient is not None:
                platform.add_(local(parameter), local(gradient), alpha=-LEARNING_RATE)
                if self.case.precision == "main":
                    parameter.main_grad = None
                else:
                    platform.set_grad(local(parameter), None)
