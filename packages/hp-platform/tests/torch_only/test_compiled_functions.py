"""What stays out of compiled graphs, and names of compiled modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_platform.torch import TorchPlatform, build_platform


@pytest.fixture(scope="module")
def platform() -> TorchPlatform:
    return build_platform()


def test_hooks_and_functions_that_are_told_so_stay_out_of_compiled_graphs(platform: TorchPlatform) -> None:
    calls: list[str] = []
    graphs: list[list[str]] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_method"])
        return graph.forward

    def left_out(x: torch.Tensor) -> torch.Tensor:
        calls.append("function")
        return x.exp()

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return left_out(x.sin()).cos()

    platform.run_uncompiled([left_out])
    layer = Layer()
    platform.register_forward_pre_hook(layer, lambda *_: calls.append("before"))
    platform.register_forward_hook(layer, lambda *_: calls.append("after"))
    layer.compile(backend=backend)
    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(layer(x), x.sin().exp().cos())
    assert graphs == [["sin"], ["cos"]]
    assert calls == ["before", "function", "after"] * 2


def test_what_a_function_calls_may_be_compiled_without_the_function_itself(platform: TorchPlatform) -> None:
    graphs: list[list[str]] = []
    calls: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_method"])
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def around(x: torch.Tensor) -> torch.Tensor:
        calls.append("around")
        return inner(x)

    platform.run_uncompiled([around], recurse=False)
    x = torch.ones(3)
    compiled = torch.compile(around, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), x.sin().cos())
    assert graphs == [["sin", "cos"]]
    assert calls == ["around"] * 2


def test_names_are_those_of_before_compilation(platform: TorchPlatform) -> None:
    model = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    found = [
        platform.unwrapped_name(name) for name, _ in torch.compile(model, backend="eager").named_parameters()
    ]
    assert found == ["0.weight", "0.bias"]
