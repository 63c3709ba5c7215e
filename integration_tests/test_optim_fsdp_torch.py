"""AdamW of sharded parameters with what only torch has: layers that tensor parallelism has cut, torch's own state dicts, GradScaler."""

from __future__ import annotations

from typing import Any

from hp_fsdp import fully_shard
from hp_optim import AdamW
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


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
