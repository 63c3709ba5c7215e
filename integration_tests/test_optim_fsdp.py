"""AdamW on what fully_shard makes of parameters: flat rows, replicas, main_grad, offloaded shards, beside whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import hp_dtensor
from hp_dtensor import DTensor, Replicate
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    get_optimizer_state_dict,
    like_parameters,
    set_optimizer_state_dict,
)
from hp_optim import AdamW
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

WIDTHS = ((4, 17), (17, 5), (5, 3), (3, 2))
"""Of the layers of a unit: 2 to 17 rows, some of them fewer than ranks."""
ROWS = 3


def widest(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def make_model(world: World, dtype: str, seed: int = 7) -> Any:
    """A stack of two units, in one of which a layer is used only if it is asked for, and a scalar at the root."""
    platform, random = world.platform, np.random.default_rng(seed)

    def parameter(*shape: int) -> Any:
        value = np.asarray(random.uniform(-0.5, 0.5, shape))
        return platform.parameter(platform.tensor(value, dtype, world.device))

    class Layer(platform.Module):
        def __init__(self, columns: int, rows: int) -> None:
            super().__init__()
            self.weight = parameter(rows, columns)
            self.bias = parameter(rows)

        def forward(self, x: Any) -> Any:
            return platform.silu(platform.linear(x, self.weight, self.bias))

    class Stack(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = platform.ModuleList([Layer(*widths) for widths in WIDTHS])
            self.extra = Layer(2, 2)

        def forward(self, x: Any, uses_extra: bool = True) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.extra(x) if uses_extra else x

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Stack()
            self.between = Layer(2, 4)
            self.second = Stack()
            self.scale = parameter()

        def forward(self, x: Any, uses_extra: bool = True) -> Any:
            x = self.second(self.between(self.first(x, uses_extra)), uses_extra)
            return x * self.scale

    return Model()


class Shadow:
    """A sharded model, and plain whole tensors that are given the same gradients: an optimizer of each."""

    def __init__(
        self,
        world: World,
        mesh: Any,
        *,
        dtype: str | None = None,
        options: Any = None,
        seed: int = 7,
        **how: Any,
    ) -> None:
        self.world, self.platform, self.dtype = world, world.platform, dtype or widest(world)
        self.model = make_model(world, self.dtype, seed)
        fully_shard(self.model.first, mesh, **how)
        fully_shard(self.model.second, mesh, **how)
        fully_shard(self.model, mesh, **how)
        self.parameters = dict(self.platform.named_parameters(self.model))
        self.wholes = {
            name: self.platform.parameter(self.platform.clone(self.whole(p)))
            for name, p in self.parameters.items()
        }
        settings = {"lr": 0.05, "weight_decay": 0.1, "fused": False, **(options or {})}
        self.optimizer = AdamW(self.platform.named_parameters(self.model), **settings)
        settings.pop("divide_replicas", None)
        self.shadow = AdamW(list(self.wholes.values()), **settings)

    def whole(self, x: Any) -> Any:
        x = x.detach().full_tensor() if isinstance(x, DTensor) else self.platform.detach(x)
        return self.platform.to_device(x, self.world.device)

    def loss(self, step: int, **kwargs: Any) -> Any:
        random = np.random.default_rng(100 * step + self.world.rank)
        x = self.platform.tensor(random.uniform(-1, 1, (ROWS, 4)), self.dtype, self.world.device)
        output = self.model(x, **kwargs)
        return self.platform.mean(output * output)

    def backward(self, step: int, **kwargs: Any) -> None:
        self.platform.backward([self.loss(step, **kwargs)])

    def update(self) -> None:
        """Both, from the gradients of the sharded model."""
        platform = self.platform
        for name, parameter in self.parameters.items():
            wide = getattr(parameter, "main_grad", None)
            found = parameter.grad if wide is None else wide
            whole = None if found is None else platform.clone(self.whole(found))
            if wide is not None:
                self.wholes[name].main_grad = whole
            else:
                platform.set_grad(self.wholes[name], whole)
        self.optimizer.step()
        self.shadow.step()
        self.optimizer.zero_grad()
        self.shadow.zero_grad()

    def check(self) -> None:
        """Parameters and state, bit for bit: an element's numbers depend on nothing beside it."""
        platform = self.platform
        for name, parameter in self.parameters.items():
            other = self.wholes[name]
            self._equal(parameter, other)
            mine, theirs = self.optimizer.state.get(parameter) or {}, self.shadow.state.get(other) or {}
            assert list(mine) == list(theirs), name
            for key, value in mine.items():
                if platform.is_tensor(value):
                    self._equal(value, theirs[key])
                else:
                    assert value == theirs[key]

    def _equal(self, a: Any, b: Any) -> None:
        np.testing.assert_array_equal(
            self.platform.to_bits(self.whole(a)), self.platform.to_bits(self.whole(b))
        )

    def flat_rows(self) -> int:
        """How many rows there are: state lies as far from its shard as that of the other parameters of a row."""
        data_ptr, distances = self.platform.data_ptr, set()
        for parameter in self.parameters.values():
            shard = parameter.to_local()
            if int(np.prod(tuple(shard.shape))):
                entry = self.optimizer.state[parameter]
                distances.add(data_ptr(entry["exp_avg"].to_local()) - data_ptr(shard))
        return len(distances)


def mesh_of(world: World, replicas: int) -> Any:
    shape = (world.size,) if replicas == 0 else (replicas, world.size // replicas)
    return init_device_mesh(world.device_type, shape)


def replica_counts(world: World) -> list[int]:
    """0: a mesh of one dim."""
    return [0] + [n for n in range(2, world.size + 1) if world.size % n == 0]


@distributed(world_size=(1, 2, 3, 4), timeout=240)
def test_every_step_has_the_bits_of_whole_tensors_with_the_same_gradients(world: World) -> None:
    for replicas in replica_counts(world):
        undivided = {"amsgrad": True, "divide_replicas": False}
        for options in ({}, undivided) if replicas == world.size else ({},):
            twins = Shadow(world, mesh_of(world, replicas), options=options)
            for step, uses_extra in enumerate((True, True, False, True, False)):
                twins.backward(step, uses_extra=uses_extra)
                twins.update()
            twins.check()
            missed = [
                (twins.optimizer.state.get(p) or {}).get("missed", 0) for p in twins.parameters.values()
            ]
            assert sorted(set(missed)) == [0, 2]


@distributed(world_size=(1, 2), timeout=120)
def test_state_lies_in_rows_as_shards_do_and_the_shards_stay_where_they_are(world: World) -> None:
    twins = Shadow(world, mesh_of(world, 0))
    platform = world.platform
    addresses = [platform.data_ptr(p.to_local()) for p in twins.parameters.values()]
    for step in range(2):
        twins.backward(step)
        twins.update()
    assert addresses == [platform.data_ptr(p.to_local()) for p in twins.parameters.values()]
    part = platform.narrow(platform.zeros((2,), "float32", world.device), 0, 0, 1)
    are_rows = platform.view_base(part) is not None and all(
        platform.supports(each, world.device) for each in ("alias", "write_into_view")
    )
    if not are_rows:  # it cannot be seen there that gradients lie in a row
        return
    # Two stacks, the layer between them, and the scalar, which lies in no row.
    assert twins.flat_rows() <= 4
    local = twins.optimizer.state[twins.model.first.layers[0].weight]["exp_avg"].to_local()
    assert platform.storage_nbytes(local) == platform.itemsize(local.dtype) * int(np.prod(tuple(local.shape)))


@distributed(world_size=(2, 4), timeout=120)
def test_a_step_communicates_nothing_but_the_pieces_of_replicas(world: World) -> None:
    twins = Shadow(world, mesh_of(world, 0))
    twins.backward(0)
    with count_collectives() as counted:
        twins.optimizer.step()
    counted.assert_counts()
    twins = Shadow(world, mesh_of(world, 2))
    twins.backward(0)
    with count_collectives() as counted:
        twins.optimizer.step()
    counted.assert_counts(all_gather=1)
    numel = 0
    for parameter in twins.parameters.values():
        local = tuple(parameter.to_local().shape)
        if local:
            numel += 2 * -(-local[0] // 2) * int(np.prod(local[1:]))
    assert counted.nbytes() == numel * world.platform.itemsize(world.platform.dtype(twins.dtype))


@distributed(world_size=(2, 4), timeout=240)
def test_accumulated_scaled_and_exchanged_gradients_count_as_they_are(world: World) -> None:
    platform = world.platform
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        for step in range(4):
            for micro in range(2):
                twins.model.set_requires_gradient_sync(micro == 1 or step % 2 == 0)
                twins.backward(10 * step + micro)
            if step == 1:
                for parameter in twins.parameters.values():
                    platform.mul_(parameter.grad.to_local(), 0.25)
            if step == 2:
                weight = twins.model.first.layers[1].weight
                weight.grad = weight.grad * 2
            twins.update()
            twins.check()


@distributed(world_size=(2, 4), timeout=240)
def test_shards_that_get_other_memory_and_parameters_that_are_frozen_count_as_they_are(world: World) -> None:
    platform = world.platform
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        weight = twins.model.second.layers[1].weight
        for step in range(6):
            if step == 3:
                weight.requires_grad_(False)
            if step == 5:
                weight.requires_grad_(True)
            twins.backward(step)
            if step == 1:  # after the row was read, and before anybody has looked at the shards again
                platform.set_data_(weight.to_local(), platform.clone(platform.detach(weight.to_local())) * 2)
                platform.mul_(twins.wholes["second.layers.1.weight"], 2.0)
            twins.update()
            twins.check()
        assert twins.optimizer.state[weight]["missed"] == 2


@distributed(world_size=(2, 4), timeout=240)
def test_gradients_of_bfloat16_shards_are_reduced_in_float32_and_state_is_as_wide_as_they_come(
    world: World,
) -> None:
    if not world.platform.supports("bfloat16_compute", world.device):
        return
    for replicas, keeps in ((0, True), (2, True), (0, False)):
        policy = MixedPrecisionPolicy(
            param_dtype="bfloat16", reduce_dtype="float32", apply_grad_on_fp32_main_grad=keeps
        )
        twins = Shadow(world, mesh_of(world, replicas), dtype="bfloat16", mp_policy=policy)
        for step in range(3):
            twins.backward(step, uses_extra=step != 1)
            twins.update()
            twins.check()
        weight = twins.model.first.layers[0].weight
        entry = twins.optimizer.state[weight]
        assert world.platform.dtype_name(entry["exp_avg"].dtype) == ("float32" if keeps else "bfloat16")
        assert world.platform.dtype_name(weight.dtype) == "bfloat16"


@distributed(world_size=(2, 4), timeout=240)
def test_main_grads_of_a_row_may_be_plain_pieces_or_lie_otherwise(world: World) -> None:
    platform = world.platform
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        for step in range(3):
            twins.backward(step, uses_extra=True)
            for name, parameter in twins.parameters.items():
                platform.set_grad(twins.wholes[name], platform.clone(twins.whole(parameter.grad)))
                gradient = parameter.grad
                parameter.main_grad = (
                    gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
                    if step == 1
                    else gradient.to_local()
                )
            twins.optimizer.step()
            twins.shadow.step()
            twins.optimizer.zero_grad()
            twins.shadow.zero_grad()
            twins.check()


@distributed(world_size=(1, 2, 4), timeout=240)
def test_offloaded_shards_are_updated_on_the_host(world: World) -> None:
    for replicas in [0] + [2] * (world.size > 1):
        twins = Shadow(world, mesh_of(world, replicas), offload_policy=CPUOffloadPolicy(pin_memory=False))
        for step in range(3):
            twins.backward(step, uses_extra=step != 1)
            twins.update()
            twins.check()
        entry = twins.optimizer.state[twins.model.first.layers[0].weight]
        assert world.platform.device_of(entry["exp_avg"].to_local()) == "cpu"


@distributed(world_size=(2, 3), timeout=240)
def test_whole_parameters_that_are_kept_are_gathered_anew_behind_a_step(world: World) -> None:
    """A write to a row counts for all of its shards, also on a rank whose own are empty."""
    for replicas in [0] + [2] * (world.size % 2 == 0):
        twins = Shadow(world, mesh_of(world, replicas), reshard_after_forward=False)
        other = Shadow(world, mesh_of(world, replicas))
        for each in (twins, other):
            each.model.set_reshard_after_backward(each is other)
            for step in range(3):
                each.backward(step)
                each.update()
                each.check()
        for a, b in zip(twins.parameters.values(), other.parameters.values(), strict=True):
            twins._equal(a, b)


@distributed(world_size=2, timeout=120)
def test_a_step_between_forward_and_backward_is_noticed(world: World) -> None:
    if not world.platform.supports("version_counter", world.device):
        return
    twins = Shadow(world, mesh_of(world, 0))
    twins.backward(0)
    late = twins.loss(1)
    twins.optimizer.step()
    try:
        world.platform.backward([late])
    except RuntimeError as error:
        assert "were written between a forward and its backward" in str(error)
    else:
        raise AssertionError("the step was not noticed")


@distributed(world_size=2, timeout=120)
def test_two_models_in_one_process_go_their_own_ways(world: World) -> None:
    first = Shadow(world, mesh_of(world, 0))
    second = Shadow(world, mesh_of(world, 2), seed=8)
    for step in range(3):
        for twins in (first, second) if step % 2 else (second, first):
            twins.backward(step)
            twins.update()
            twins.check()
    together = AdamW(
        [
            {"params": list(first.parameters.values())},
            {"params": list(second.parameters.values()), "lr": 0.0},
        ],
        fused=False,
    )
    kept = [twin.whole(p) for twin in (second,) for p in second.parameters.values()]
    for twins in (first, second):
        twins.backward(5)
    for group in together.param_groups:
        group["weight_decay"] = 0.0
    together.step()
    for before, parameter in zip(kept, second.parameters.values(), strict=True):
        second._equal(before, parameter)
    assert any(
        (
            world.platform.to_numpy(first.whole(p)) != world.platform.to_numpy(first.whole(first.wholes[n]))
        ).any()
        for n, p in first.parameters.items()
    )


@distributed(world_size=(1, 2, 3, 4), timeout=240)
def test_state_by_names_is_saved_and_goes_on_on_another_mesh(world: World, tmp_path: Path) -> None:
    """Written from one mesh, read into another; a parameter without state stays without, until it has a gradient."""
    counts = replica_counts(world)
    for number, (first, second) in enumerate(zip(counts, [*counts[1:], counts[0]], strict=True)):
        before = Shadow(world, mesh_of(world, first))
        for step in range(2):
            before.backward(step, uses_extra=False)
            before.update()
        saved = get_optimizer_state_dict(before.model, before.optimizer)
        assert "first.extra.weight" not in saved["state"]
        model = {name: p.detach() for name, p in before.parameters.items()}
        place = tmp_path / f"{world.size}_{number}"
        hp_dtensor.save({"model": model, "optimizer": saved}, place)
        after = Shadow(world, mesh_of(world, second), options={"lr": 0.7})
        found = hp_dtensor.load(place, like=like_parameters(after.model))
        for name, parameter in after.parameters.items():
            value = found["model"][name]
            local = value.to_local() if isinstance(value, DTensor) else value
            world.platform.copy_(parameter.to_local(), world.platform.detach(local))
        set_optimizer_state_dict(after.model, after.optimizer, found["optimizer"])
        # The plain tensors go on from what they were.
        after.wholes, after.shadow = before.wholes, before.shadow
        for step in range(2, 5):
            after.backward(step, uses_extra=step > 2)
            after.update()
            after.check()
        assert after.optimizer.param_groups[0]["lr"] == 0.05


@distributed(world_size=(2, 4), timeout=240)
def test_state_is_written_into_rows_that_are_in_use(world: World) -> None:
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        twins.backward(0)
        twins.update()
        kept = {n: world.platform.clone(twins.whole(p)) for n, p in twins.parameters.items()}
        saved = get_optimizer_state_dict(twins.model, twins.optimizer)
        saved = {
            "param_groups": saved["param_groups"],
            "state": {
                name: {
                    key: value.full_tensor() if isinstance(value, DTensor) else value
                    for key, value in entry.items()
                }
                for name, entry in saved["state"].items()
            },
        }
        saved = {
            **saved,
            "state": {
                name: {
                    key: world.platform.clone(value) if world.platform.is_tensor(value) else value
                    for key, value in entry.items()
                }
                for name, entry in saved["state"].items()
            },
        }
        reference = Shadow(world, mesh_of(world, replicas))
        for step in range(2):
            reference.backward(step)
            reference.update()
        for step in range(1, 3):
            twins.backward(step)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
        set_optimizer_state_dict(twins.model, twins.optimizer, saved)
        for name, parameter in twins.parameters.items():
            local = parameter.to_local()
            if tuple(parameter.shape):
                given = hp_dtensor.distribute_tensor(
                    kept[name], parameter.device_mesh, parameter.placements
                ).to_local()
            else:
                given = kept[name]
            world.platform.copy_(local, world.platform.detach(given))
        twins.backward(1)
        twins.optimizer.step()
        for name, parameter in twins.parameters.items():
            reference._equal(parameter, reference.parameters[name])


def trained(world: World, mesh: Any, steps: int) -> tuple[Any, Any]:
    """One process' whole training on the samples of all ranks, and the sharded one."""
    platform, dtype = world.platform, widest(world)
    reference = make_model(world, dtype)
    sharded = Shadow(world, mesh)
    optimizer = AdamW(list(platform.named_parameters(reference)), lr=0.05, weight_decay=0.1, fused=False)
    for step in range(steps):
        losses = []
        for rank in range(world.size):
            random = np.random.default_rng(100 * step + rank)
            x = platform.tensor(random.uniform(-1, 1, (ROWS, 4)), dtype, world.device)
            output = reference(x)
            losses.append(platform.mean(output * output))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        platform.backward([total / world.size])
        optimizer.step()
        optimizer.zero_grad()
        sharded.backward(step)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    return reference, sharded


@distributed(world_size=(1, 2, 3, 4), timeout=240)
def test_after_several_steps_parameters_equal_those_of_one_process(world: World) -> None:
    platform = world.platform
    # Gradients are summed in another order, which AdamW divides by their own size: units in the last place relative to a step of
    # lr, unless a gradient is near 0, where a step's direction is decided by rounding; none is here. Measured below 1e-14.
    atol = 1e-11 if widest(world) == "float64" else 2e-3
    for replicas in replica_counts(world):
        reference, sharded = trained(world, mesh_of(world, replicas), 5)
        for name, parameter in platform.named_parameters(reference):
            actual = platform.to_numpy(sharded.whole(sharded.parameters[name]))
            np.testing.assert_allclose(
                actual, platform.to_numpy(platform.detach(parameter)), rtol=0, atol=atol, err_msg=name
            )


@distributed(world_size=(2, 4), timeout=240, backends=("torch", "cuda"))
def test_tensor_parallel_layers_under_fully_shard_have_the_bits_of_whole_tensors(world: World) -> None:
    import torch

    from hp_tp import ColwiseParallel, RowwiseParallel, parallelize_module

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(6)
            self.up = torch.nn.Linear(6, 10)
            self.down = torch.nn.Linear(10, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    shapes = [(1, world.size // 2, 2)] if world.size == 2 else [(1, 2, 2), (2, 1, 2)]
    for shape in shapes:
        mesh = init_device_mesh(world.device_type, shape, mesh_dim_names=("rep", "dp", "tp"))
        torch.manual_seed(0)
        model = torch.nn.Sequential(Layers(), Layers()).to(world.device, torch.float64)
        for layers in model:
            parallelize_module(layers, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layers, mesh["rep", "dp"])
        fully_shard(model, mesh["rep", "dp"])
        settings = {"lr": 0.05, "weight_decay": 0.1, "fused": False}
        wholes = {
            n: torch.nn.Parameter(p.detach().full_tensor().clone()) for n, p in model.named_parameters()
        }
        optimizer, shadow = AdamW(model.named_parameters(), **settings), AdamW(wholes.values(), **settings)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + world.rank // 2)
            model(
                torch.randn(3, 6, generator=generator, dtype=torch.float64).to(world.device)
            ).square().mean().backward()
            for name, parameter in model.named_parameters():
                wholes[name].grad = parameter.grad.full_tensor().clone()
            optimizer.step()
            shadow.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach().full_tensor(), wholes[name]), name
                for key, value in shadow.state[wholes[name]].items():
                    found = optimizer.state[parameter][key]
                    assert torch.equal(found.full_tensor(), value), (name, key)
                    assert (tuple(found.placements) == tuple(parameter.placements)) == (shape[0] == 1)


@distributed(world_size=2, timeout=240, backends=("torch", "cuda"))
def test_torchs_own_state_dict_functions_and_grad_scaler_take_it(world: World) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as read
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as write

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)).to(world.device)
        fully_shard(model, init_device_mesh(world.device_type, (2,)))
        return model, AdamW(model.parameters(), lr=0.1)

    (model, optimizer), (other_model, other) = made(), made()
    x = torch.full((2, 4), 1.0 + world.rank, device=world.device)
    scaler = torch.amp.GradScaler(world.device, init_scale=8.0)
    for _ in range(2):
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["step"] == 2
    saved = read(model, optimizer)
    assert set(saved["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    write(other_model, other, saved)
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        b.to_local().data.copy_(a.to_local().data)
    for each_model, each in ((model, optimizer), (other_model, other)):
        each_model(x).square().mean().backward()
        each.step()
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    assert other.param_groups[0]["step"] == 3
