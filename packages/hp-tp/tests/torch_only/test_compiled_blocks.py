"""Layers in styles as one compiled graph: the numbers of one process, the textbook's collectives in the graph, and no DTensors."""

from __future__ import annotations

import copy
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, SequenceParallel, compile_block, parallelize_module

sys.path.insert(0, str(Path(__file__).parent.parent))
from tp_models import Config, activation, block_of, make_mesh, model_of, token_ids, tolerance
from tp_plans import block_plan, model_plan
from tp_training import check_steps, cross_entropy

# dynamo looks at `.grad` of what is no leaf, which torch warns of, and makes a Function, which torch deprecates. Where there is a
# GPU, torch's own inductor meets a deprecation of torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

CONFIG = Config(heads=4, kv_heads=2, head_dim=4, hidden=12, length=4, tied=True)


class Graphs:
    """A backend that runs what it gets as it is, and counts the collectives in it."""

    def __init__(self) -> None:
        self.forward: list[Counter[str]] = []
        self.backward: list[Counter[str]] = []

    def backend(self) -> Any:
        def into(counts: list[Counter[str]]) -> Any:
            def compiler(graph: Any, _: Any) -> Any:
                names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
                found = (name.split(".")[1] for name in names if name.startswith("_c10d_functional."))
                counts.append(Counter(name for name in found if name != "wait_tensor"))
                return make_boxed_func(graph.forward)

            return compiler

        backend: Any = aot_autograd(fw_compiler=into(self.forward), bw_compiler=into(self.backward))
        return backend


def check_compiled(world: World, sequence: bool, **options: Any) -> Any:
    """Three steps of a model whose layers are compiled."""

    def build() -> Any:
        return model_of(world, CONFIG)

    def loss_of(model: Any, step: int) -> Any:
        ids, targets = token_ids(world, CONFIG, step)
        if isinstance(model.embed.weight, DTensor) and not hasattr(model, "is_compiled"):
            for layer in model.layers:
                compile_block(layer, **options)
            model.is_compiled = True
        return cross_entropy(world.platform, model(ids), targets)

    plan = model_plan(CONFIG, world.size, sequence=sequence, is_plain=True, logits=Shard(-1))
    return check_steps(world, build, plan, loss_of)


# The first that compiles imports the compiler, and starts one of C++: most of a minute on two cores.
@distributed(world_size=2, backends=("torch", "cuda"), timeout=180)
def test_a_compiled_layer_is_one_graph_with_the_textbooks_collectives(world: World) -> None:
    expected = {
        False: ({"all_reduce": 2}, {"all_reduce": 2}),
        # The norms' weights, and the biases behind reduce-scatters, are summed over ranks, too.
        True: (
            {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
            {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 4},
        ),
    }
    for sequence, (forward, backward) in expected.items():
        graphs = Graphs()
        check_compiled(world, sequence, backend=graphs.backend())
        # All layers share one, compiled once in three steps.
        assert graphs.forward == [forward]
        assert graphs.backward == [backward]


# Where there are few rows, inductor splits the reduction of a softmax over processors, and warns that it is then not its
# fastest one. The numbers are right, and few rows are what a test has.
@pytest.mark.filterwarnings(
    r"ignore:\s*Online softmax is disabled on the fly since Inductor decides:UserWarning"
)
@distributed(world_size=2, backends=("cuda",))
def test_layers_compiled_by_inductor_give_the_numbers_of_one_process(world: World) -> None:
    for sequence in (False, True):
        check_compiled(world, sequence)


@distributed(world_size=4, backends=("torch",), timeout=180)
def test_layers_on_two_meshes_in_one_graph_gather_one_tensor_each_for_its_own(world: World) -> None:
    """The same piece is one of two columns of ranks, and one of two rows."""
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("rows", "columns"))
    for layout in (Shard(0), Replicate()):
        graphs, model = Graphs(), torch.nn.ModuleDict()
        for name in ("rows", "columns"):
            torch.manual_seed(0)
            layer = torch.nn.Linear(4, 6, dtype=torch.float64)
            model[name] = parallelize_module(layer, mesh[name], ColwiseParallel(input_layouts=layout))

        class Both(torch.nn.Module):
            def __init__(self, layers: Any) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return self.layers["rows"](x), self.layers["columns"](x)

        both = Both(model)
        x = (torch.arange(8.0, dtype=torch.float64).reshape(2, 4) + 10 * world.rank).requires_grad_()
        expected = both(x)
        (expected_grad,) = torch.autograd.grad(sum(y.sum() for y in expected), x)
        compile_block(both, backend=graphs.backend())
        found = both(x)
        (found_grad,) = torch.autograd.grad(sum(y.sum() for y in found), x)
        for y, z in zip((*found, found_grad), (*expected, expected_grad), strict=True):
            torch.testing.assert_close(y, z)
        kinds = (
            ("all_gather_into_tensor", "reduce_scatter_tensor")
            if layout == Shard(0)
            else (None, "all_reduce")
        )
        assert [dict(graph) for graph in (*graphs.forward, *graphs.backward)] == [
            {} if kind is None else {kind: 2} for kind in kinds
        ]


@distributed(world_size=2, backends=("torch", "cuda"))
def test_parameters_of_compiled_layers_are_dtensors_for_everybody_else(world: World) -> None:
    check_compiled(world, sequence=True, backend="eager")
    model = check_compiled(world, sequence=False, backend="eager")
    found = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for name, p in found.items() if "attention" in name or "mlp" in name)
    assert {name.partition(".")[0] for name in found} == {"embed", "layers", "norm"}


@distributed(world_size=2, backends=("torch", "cuda"))
def test_a_compiled_block_is_saved_and_copied_with_its_own_parameters(world: World) -> None:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)).to(world.device)
    model = torch.nn.Sequential(
        compile_block(parallelize_module(layers, make_mesh(world), plan), backend="eager")
    )
    x = torch.ones(3, 4, device=world.device)
    expected = model(x)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (torch.load(stream, weights_only=False), copy.deepcopy(model)):
        torch.testing.assert_close(twin(x), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(x).any()
    torch.testing.assert_close(model(x), expected)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_an_exception_in_a_compiled_layer_leaves_its_parameters_as_they_were(world: World) -> None:
    layer = parallelize_module(block_of(world, CONFIG), make_mesh(world), block_plan(CONFIG, world.size))
    compile_block(layer, backend="eager")
    before = dict(layer.named_parameters())
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
        layer(torch.ones(3, 5, device=world.device))
    assert all(before[name] is p for name, p in layer.named_parameters())


@distributed(world_size=2, backends=("torch", "cuda"))
def test_what_compiled_layers_cannot_take_is_told(world: World) -> None:
    mesh = make_mesh(world)
    block = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 4))
    parallelize_module(block, mesh, {"0": SequenceParallel(), "1": ColwiseParallel()})
    compile_block(block, backend="eager")
    with pytest.raises(
        Exception, match="compiled code takes and gives plain pieces: say use_local_output=True"
    ):
        block(torch.ones(2, 3, 4))
    given = distribute_tensor(torch.ones(2, 4, 4), mesh, [Shard(1)])
    with pytest.raises(
        ValueError, match=r"compile_block of Sequential: argument 0 is a DTensor of .*sequence_parallel=False"
    ):
        block(given)
    uneven = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelize_module(uneven, mesh, {"0": RowwiseParallel(output_layouts=Shard(1), uneven=True)})
    compile_block(uneven, backend="eager")
    with pytest.raises(
        Exception, match=r"dim 1 of size 3 does not divide over 2 ranks, and compiled code takes equal"
    ):
        uneven(torch.ones(2, 3, 2))


@distributed(world_size=2, backends=("torch", "cuda"))
def test_compiled_layers_run_without_gradients(world: World) -> None:
    layers = [block_of(world, CONFIG) for _ in range(2)]
    parallelize_module(layers[1], make_mesh(world), block_plan(CONFIG, world.size))
    compile_block(layers[1], backend="eager")
    x = activation(world, CONFIG).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected, found = (layer(x) for layer in layers)
        assert_parity(found, expected, **tolerance(world), name=mode.__name__)
