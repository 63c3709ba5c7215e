"""Models of the transformers library in tiny random configurations, and the way to compare them with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_dtensor import DTensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity
from hp_tp import parallelize_module, plan_for

transformers = pytest.importorskip("transformers", reason="needs transformers>=5.20,<6, as nox installs it")

VOCABULARY = 50
"""On 3 ranks 17, 17 and 16 words, on 4 ranks 13, 13, 13 and 11."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    # The grouped kernels of experts take no float64.
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
}
CLOSE = {"rtol": 0.0, "atol": 1e-12}
"""Numbers near 1 in float64. What these models round to float32 on their way (norms, the softmax of eager attention) rounds alike: two
numbers 1e-16 apart are rounded to different ones once in a hundred million."""
ROUNDED = {"rtol": 0.0, "atol": 2e-6}
"""Where float32 numbers are added up in another order: the loss that the models compute themselves, of logits in float32, and the
gradient of a router, whose probabilities are in float32. Some units in the last place of values near 4."""


def build(kind: str, *, exact_norms: bool = False, **changes: Any) -> Any:
    """The same numbers at every call, in float64; no parameter is what it was initialised to, so that none is 0 or 1.

    ``exact_norms``: with torch's own RMSNorm, in float64, in the places of the library's, which round to float32.
    """
    configuration, model, own = KINDS[kind]
    config = getattr(transformers, configuration)(**{**SIZES, **own, **changes})
    made = getattr(transformers, model)(config)
    if exact_norms:
        for name, norm in [(n, m) for n, m in made.named_modules() if type(m).__name__.endswith("RMSNorm")]:
            made.set_submodule(name, torch.nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon))
    made = made.double()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
            parameter.copy_(0.3 * values + (1 if parameter.dim() == 1 else 0))
    return made


def parallel(world: World, model: Any, **options: Any) -> Any:
    """The model under its plan."""
    mesh = init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, plan_for(model, **options))


def ids_of(world: World, length: int, seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Words other than padding."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=random).to(world.device)


def whole(x: Any) -> torch.Tensor:
    """A plain tensor of the whole."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """All of them, whole, in the shapes of the model's own parameters."""
    assert all(parameter.grad is not None for parameter in model.parameters())
    return {name: flat(name, whole(p.grad)) for name, p in model.named_parameters()}


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """All of them, whole, in the shapes of the model's own parameters."""
    return {name: flat(name, whole(p)) for name, p in model.named_parameters()}


def flat(name: str, x: torch.Tensor) -> torch.Tensor:
    """``(experts, 2, inner, hidden)`` as the library has it: see [Note: the pair] in :mod:`hp_tp.plans.experts`."""
    return x.flatten(1, 2) if name.endswith("gate_up_proj") and x.dim() == 4 else x


def check_training(
    world: World, kind: str, length: int, options: dict[str, Any], steps: int = 3, **changes: Any
) -> Any:
    """Logits, losses, all gradients and the parameters after some steps are those of one process; returns both models."""
    reference, model = build(kind, **changes).to(world.device), build(kind, **changes).to(world.device)
    parallel(world, model, **options)
    limits = ROUNDED if kind == "mixtral" else CLOSE
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    for step in range(steps):
        ids = ids_of(world, length, step)
        expected, found = reference(ids), model(ids)
        assert_parity(whole(found.logits), expected.logits.detach(), **limits, name=f"logits of step {step}")
        # A loss in float64, which the library's own is not.
        losses = [square_of(output.logits) for output in (expected, found)]
        for loss in losses:
            loss.backward()
        assert_parity(whole(losses[1]), losses[0].detach(), **limits, name=f"loss of step {step}")
        assert_parity(gradients(model), gradients(reference), **limits, name=f"gradients of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(parameters(model), parameters(reference), **limits, name="parameters after the steps")
    return reference, model


def square_of(logits: Any) -> Any:
    """A loss of which every logit has another gradient."""
    return (logits * logits).mean() + logits.log_softmax(-1)[..., ::7].mean()


def check_own_loss(world: World, reference: Any, model: Any, length: int) -> None:
    """The loss that the model computes of labels, one of which is ignored, and its gradients."""
    ids = ids_of(world, length, 11)
    labels = ids.clone()
    labels[0, 1] = -100
    losses = [m(ids, labels=labels).loss for m in (reference, model)]
    for m, loss in zip((reference, model), losses, strict=True):
        m.zero_grad()
        loss.backward()
    assert_parity(whole(losses[1]), losses[0].detach(), **ROUNDED, name="the model's own loss")
    assert_parity(gradients(model), gradients(reference), **ROUNDED, name="gradients of it")
