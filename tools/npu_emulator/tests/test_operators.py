"""aten operators on the device: the same results as on the CPU, and no silent CPU fallback."""

import copy

import pytest
import torch
import torch_npu  # noqa: F401

from npu_emulator.kernels import calls

# torch_npu prints this to the error stream, from C++, once per operator.
FALLBACK = "not currently supported on the NPU backend"


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 16),
        torch.nn.Linear(16, 32),
        torch.nn.GELU(),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 50),
    )


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def test_gradients_of_a_training_step_equal_the_cpu(npu: torch.device) -> None:
    tokens = torch.arange(40).reshape(4, 10)
    on_cpu = _model()
    on_npu = copy.deepcopy(on_cpu).to(npu)
    _loss(on_cpu, tokens).backward()
    _loss(on_npu, tokens.to(npu)).backward()
    for expected, given in zip(on_cpu.parameters(), on_npu.parameters(), strict=True):
        assert given.grad.device.type == "npu"
        torch.testing.assert_close(given.grad.cpu(), expected.grad)


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"]
)
def test_optimizer_steps_equal_the_cpu(npu: torch.device, options: dict[str, bool]) -> None:
    tokens = torch.arange(40).reshape(4, 10)
    parameters = {}
    for device in (torch.device("cpu"), npu):
        model = _model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for _ in range(3):
            optimizer.zero_grad()
            _loss(model, tokens.to(device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        parameters[device.type] = [p.detach().cpu() for p in model.parameters()]
    for expected, given in zip(parameters["cpu"], parameters["npu"], strict=True):
        torch.testing.assert_close(given, expected)


def test_attention_has_the_gradient_of_the_cpu(npu: torch.device) -> None:
    q = torch.randn(2, 4, 8, 16)
    gradients = []
    for device in (torch.device("cpu"), npu):
        x = q.clone().to(device).requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).pow(2).sum().backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def _views(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:, ::2].add_(1)
    y.t()[0].mul_(3)
    return y.permute(1, 0).reshape(-1)[2:]


COMMON = {
    "arithmetic": lambda x: (x + 1) * x / (x.abs() + 2) - x.pow(2),
    "matmul": lambda x: x @ x.t() + torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: torch.log_softmax(x, -1) + torch.softmax(x, 0),
    "reductions": lambda x: x.sum(0) + x.mean(0) + x.amax(0) + x.norm() + x.std(),
    "indexing": lambda x: x[torch.tensor([1, 0], device=x.device), :3],
    "masking": lambda x: torch.where(x > 0, x, x.masked_fill(x < -1, 0)),
    "index writes": lambda x: x.clone().index_add_(0, torch.tensor([0, 0], device=x.device), x[:2]),
    "scatter": lambda x: torch.zeros_like(x).scatter_(1, x.argsort(1), x),
    "sorting": lambda x: torch.cat([x.sort(1).values, x.topk(2, 1).values, x.argmax(1, keepdim=True)], 1),
    "counting": lambda x: torch.bincount((x > 0).long().flatten(), minlength=3),
    "one hot": lambda x: torch.nn.functional.one_hot(x.argmax(1), 6),
    "cumulative": lambda x: x.cumsum(1) + torch.tril(x),
    "views": _views,
    "out=": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "foreach": lambda x: torch._foreach_add(torch._foreach_mul([x, x], 2), 1)[1],
    "split and stack": lambda x: torch.stack(x.split(3, 1)).flatten(0, 1).repeat_interleave(2, 0),
    "casts": lambda x: x.bfloat16().float() + x.half().float() + x.int(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * 1j),
    "nonzero": lambda x: (x > 0).nonzero(),
    "conv": lambda x: torch.nn.functional.conv1d(x[None], torch.ones(1, x.shape[0], 3, device=x.device)),
}


@pytest.mark.parametrize("name", COMMON)
def test_common_operators_equal_the_cpu_without_fallback(
    npu: torch.device, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(4, 6)
    given = COMMON[name](x.to(npu))
    assert FALLBACK not in capfd.readouterr().err
    assert given.device.type == "npu"
    torch.testing.assert_close(given.cpu(), COMMON[name](x))


def test_an_operator_without_npu_kernel_still_warns(
    npu: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.rand(4)
    given = torch.special.i1e(x.to(npu))
    assert FALLBACK in capfd.readouterr().err
    torch.testing.assert_close(given.cpu(), torch.special.i1e(x))


def test_kernels_are_counted(npu: torch.device) -> None:
    before = calls["aten::mm"]
    torch.ones(2, 2, device=npu).mm(torch.ones(2, 2, device=npu))
    assert calls["aten::mm"] == before + 1


def test_a_result_can_be_resized_in_its_storage(npu: torch.device) -> None:
    x = torch.arange(8.0, device=npu)
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(32)
    x.copy_(torch.ones(8))
    assert x.tolist() == [1.0] * 8
