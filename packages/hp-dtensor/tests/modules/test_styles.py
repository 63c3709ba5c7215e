"""parallelize_module with styles of the user's and the styles that move inputs and outputs, against one process."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor.distributed_module import distribute_module
from hp_dtensor.styles import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import check, input_of, make, make_mesh, placed_input, tensor, tolerance

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Cut(ParallelStyle):
    """Cuts weight and bias over ``tp``; takes lines and grids."""

    num_mesh_dims = None

    def __init__(self, weight: Any, bias: Any) -> None:
        self.places = {"weight": weight, "bias": bias}

    def apply(self, module: Any, device_mesh: Any) -> Any:
        from hp_platform import get_platform

        platform: Any = get_platform()

        def partition(name: str, submodule: Any, mesh: Any) -> None:
            for attribute, place in self.places.items():
                placements = [place if dim == "tp" else R for dim in mesh.mesh_dim_names]
                cut = distribute_tensor(
                    getattr(submodule, attribute), mesh, placements, src_data_rank=self.src_data_rank
                )
                platform.set_parameter(submodule, attribute, platform.parameter(cut))

        return distribute_module(module, device_mesh, partition)


def _plan(mesh: Any) -> dict[str, Any]:
    batch = [S0 if name == "dp" else R for name in mesh.mesh_dim_names]
    return {
        "": PrepareModuleInputOutput(
            input_layouts=(batch,),
            desired_input_layouts=(batch,),
            output_layouts=(batch,),
            desired_output_layouts=(batch,),
            use_local_output=False,
        ),
        "attention.[qkv]": Cut(S0, S0),
        "*.o": Cut(S1, R),
        "mlp.up": Cut(S0, S0),
        "mlp.d*": Cut(S1, R),
    }


@distributed(world_size=(1, 2, 3))
def test_a_layer_on_a_line_of_ranks(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    assert parallelize_module(module, mesh, _plan(mesh), src_data_rank=None) is module
    forward, backward = check(world, module, placed_input(world, mesh))
    if world.size > 1:
        forward.assert_counts(all_reduce=2)
        backward.assert_counts(all_reduce=2)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_layer_on_a_grid(world: World) -> None:
    mesh, module = make_mesh(world, grid=True), make(world)
    parallelize_module(module, mesh, _plan(mesh), src_data_rank=None)
    forward, backward = check(world, module, placed_input(world, mesh))
    forward.assert_counts(all_reduce=2)
    backward.assert_counts(all_reduce=14)


@distributed(world_size=2)
def test_the_values_of_the_source_rank_count(world: World) -> None:
    mesh, module, p = make_mesh(world), make(world, "MLP"), world.platform
    with p.no_grad():
        for _, parameter in p.named_parameters(module):
            p.fill_(parameter, float(world.rank + 1))
    style = Cut(S0, S0)
    with mesh:
        parallelize_module(module.up, parallelize_plan=style)
    assert style.src_data_rank == 0
    assert (
        p.to_numpy(module.up.weight.full_tensor()).min()
        == p.to_numpy(module.up.weight.full_tensor()).max()
        == 1
    )


@distributed(world_size=(1, 2))
def test_plain_inputs_and_outputs_around_a_layer(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    plan = _plan(mesh)
    plan[""] = PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=R, output_layouts=R, desired_output_layouts=R
    )
    parallelize_module(module, mesh, plan, src_data_rank=None)
    check(world, module, input_of(world))


@distributed(world_size=(1, 2, 3))
def test_uneven_plain_pieces_are_gathered_and_cut_at_the_doors(world: World) -> None:
    mesh, p = make_mesh(world), world.platform

    class Weighted(p.Module):
        def forward(self, x: Any, flag: bool, *, scale: Any = None) -> Any:
            assert flag
            assert x.placements == (R,)
            return x * scale, flag

    module = Weighted()
    parallelize_module(
        module,
        mesh,
        {
            "": PrepareModuleInput(
                input_layouts=(S0, None),
                desired_input_layouts=(R, None),
                input_kwarg_layouts={"scale": R},
                desired_input_kwarg_layouts={"scale": R},
            )
        },
    )
    PrepareModuleOutput(output_layouts=(R, None), desired_output_layouts=(S0, None)).apply(module, mesh)
    whole, scale = tensor(world, 5, 2), tensor(world, 5, 2, seed=3)
    piece = p.set_requires_grad_(distribute_tensor(whole, mesh, [S0]).to_local(), True)
    with count_collectives() as counted:
        result, flag = module(piece, True, scale=scale)
    counted.assert_counts(all_gather=2 if world.size > 1 else 0)  # of sizes, and of the pieces
    assert flag is True
    assert not hasattr(result, "placements")
    expected = distribute_tensor(whole * scale, mesh, [S0]).to_local()
    assert_parity(result, expected, **tolerance(world))
    p.backward([p.sum(result)])
    assert_parity(p.get_grad(piece), distribute_tensor(scale, mesh, [S0]).to_local(), **tolerance(world))
    with pytest.raises(ValueError, match="Weighted got 1 positional arguments for 2 input_layouts"):
        module(piece, scale=scale, flag=True)


@distributed(world_size=2)
def test_any_object_with_apply_is_a_style_and_may_put_another_module_in_place(world: World) -> None:
    mesh, p = make_mesh(world), world.platform

    class Double(p.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x) * 2

    class Doubled:
        def apply(self, module: Any, device_mesh: Any) -> Any:
            assert device_mesh is mesh
            return Double(module)

    module, plain = make(world, "MLP"), make(world, "MLP")
    x = tensor(world, 3, 12)
    assert parallelize_module(module, mesh, {"down": Doubled(), "up": Doubled()}) is module
    expected = plain.down(p.gelu(plain.up(x) * 2)) * 2
    assert_parity(module(x), expected, **tolerance(world))
    root = parallelize_module(module, mesh, Doubled())
    assert type(root) is Double
    assert_parity(root(x), expected * 2, **tolerance(world))


@distributed(world_size=2)
def test_a_tied_weight_stays_one_parameter(world: World) -> None:
    mesh, module = make_mesh(world), make(world, "Tied")
    parallelize_module(module, mesh, {"last": Cut(S0, S0)}, src_data_rank=None)
    assert module.first.weight is module.last.weight
    distribute_module(module, mesh)
    check(world, module, placed_input(world, mesh), "Tied")


@distributed(world_size=2)
def test_without_a_plan_there_is_a_warning_and_no_change(world: World) -> None:
    module = make(world, "MLP")
    with pytest.warns(UserWarning, match="parallelize_module without parallelize_plan changes nothing"):
        assert parallelize_module(module, make_mesh(world)) is module
