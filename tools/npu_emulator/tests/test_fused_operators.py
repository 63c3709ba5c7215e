"""Fused npu:: operators, forward and backward through torch_npu's autograd, against plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


def _same(fused: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> None:
    """Compare the result and every gradient, for one random gradient of the result."""

    def run(function: Callable[..., Any], device: str) -> list[Tensor]:
        leaves = [x.detach().clone().to(device).requires_grad_() for x in inputs]
        result = function(*leaves)
        result = result[0] if isinstance(result, tuple) else result
        gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
        result.backward(gradient.to(device))
        return [result.detach().cpu(), *(x.grad.cpu() for x in leaves)]

    for given, expected in zip(run(fused, "npu"), run(plain, "cpu"), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_rms_norm(npu: torch.device) -> None:
    x, gamma = torch.randn(2, 5, 16), torch.rand(16)
    _same(
        lambda x, g: torch_npu.npu_rms_norm(x, g, epsilon=1e-5),
        lambda x, g: rms_norm(x, (16,), g, 1e-5),
        x,
        gamma,
    )


def test_rms_norm_returns_the_inverse_deviation_in_float32(npu: torch.device) -> None:
    x = torch.randn(3, 16, device=npu, dtype=torch.bfloat16)
    y, rstd = torch_npu.npu_rms_norm(x, torch.ones(16, device=npu, dtype=torch.bfloat16))
    assert (y.dtype, rstd.dtype, rstd.shape) == (torch.bfloat16, torch.float32, (3, 1))


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(npu: torch.device, dim: int) -> None:
    def plain(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim)
        return silu(a) * b

    _same(lambda x: torch_npu.npu_swiglu(x, dim=dim), plain, torch.randn(2, 6, 16))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(npu: torch.device, mode: str) -> None:
    def turned(x: Tensor) -> Tensor:
        if mode == "half":
            a, b = x.chunk(2, -1)
            return torch.cat((-b, a), -1)
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 1, 8), torch.randn(1, 5, 1, 8)
    _same(
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, mode),
        lambda x, c, s: x * c + turned(x) * s,
        x,
        cos,
        sin,
    )


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # from [B, N, S, D]
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), **options
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fusion_attention(npu: torch.device, layout: str, causal: bool) -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    arrange = LAYOUTS[layout]
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=npu).triu(1)
    options = {"atten_mask": mask, "sparse_mode": 3} if causal else {}

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_npu.npu_fusion_attention(
            arrange(q).contiguous(),
            arrange(k).contiguous(),
            arrange(v).contiguous(),
            4,
            layout,
            scale=8**-0.5,
            **options,
        )[0]

    _same(fused, lambda q, k, v: arrange(_attention(q, k, v, is_causal=causal)), q, k, v)


def test_fusion_attention_hides_where_the_mask_is_one(npu: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    hidden = torch.rand(4, 4) < 0.4
    hidden.fill_diagonal_(False)
    _same(
        lambda q, k, v: torch_npu.npu_fusion_attention(
            q, k, v, 2, "BNSD", scale=0.3, atten_mask=hidden.to(npu)
        )[0],
        lambda q, k, v: _attention(q, k, v, attn_mask=~hidden, scale=0.3),
        q,
        k,
        v,
    )


def test_fusion_attention_aligns_the_causal_mask_to_the_right_for_mode_3(npu: torch.device) -> None:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=npu).triu(1)
    for mode, shift in ((2, 0), (3, 2)):
        visible = torch.ones(3, 5, dtype=torch.bool).tril(shift)
        _same(
            lambda q, k, v, mode=mode: torch_npu.npu_fusion_attention(
                q, k, v, 2, "BNSD", scale=0.3, atten_mask=mask, sparse_mode=mode
            )[0],
            lambda q, k, v, visible=visible: _attention(q, k, v, attn_mask=visible, scale=0.3),
            q,
            k,
            v,
        )


def test_fusion_attention_keeps_packed_documents_apart(npu: torch.device) -> None:
    lengths = [2, 5, 3]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=npu).triu(1)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_npu.npu_fusion_attention(
            q,
            k,
            v,
            4,
            "TND",
            scale=8**-0.5,
            atten_mask=mask,
            sparse_mode=3,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([_attention(*one, is_causal=True)[0].transpose(0, 1) for one in documents])

    _same(fused, plain, q, k, v)


def test_fusion_attention_refuses_what_is_not_emulated(npu: torch.device) -> None:
    q = torch.randn(1, 2, 4, 8, device=npu)
    with pytest.raises(NotImplementedError, match="dropout"):
        torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5)
    with pytest.raises(ValueError, match="input_layout='XYZ'"):
        torch_npu.npu_fusion_attention(q, q, q, 2, "XYZ")


EXPERTS = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])


def test_moe_permute_sorts_by_expert(npu: torch.device) -> None:
    tokens = torch.arange(4.0).unsqueeze(1).expand(4, 8).contiguous().to(npu)
    permuted, positions = torch_npu.npu_moe_token_permute(tokens, EXPERTS.to(npu, torch.int32))
    assert permuted[:, 0].tolist() == [0, 1, 3, 1, 2, 3, 0, 2]
    assert positions.dtype == torch.int32
    restored = torch_npu.npu_moe_token_unpermute(permuted, positions)
    assert torch.equal(restored, tokens.repeat_interleave(2, 0))


def test_moe_permute_and_unpermute(npu: torch.device) -> None:
    def fused(x: Tensor, probs: Tensor) -> Tensor:
        permuted, positions = torch_npu.npu_moe_token_permute(x, EXPERTS.to(x.device, torch.int32))
        return torch_npu.npu_moe_token_unpermute(permuted * 2, positions, probs)

    _same(
        fused, lambda x, p: (x.unsqueeze(1) * 2 * p.unsqueeze(-1)).sum(1), torch.randn(4, 8), torch.rand(4, 2)
    )


def test_moe_permute_drops_tokens_behind_the_capacity(npu: torch.device) -> None:
    kept = torch.zeros(8, dtype=torch.bool)
    kept[EXPERTS.flatten().argsort(stable=True)[:5]] = True

    def fused(x: Tensor) -> Tensor:
        permuted, positions = torch_npu.npu_moe_token_permute(
            x, EXPERTS.to(x.device, torch.int32), num_out_tokens=5
        )
        return torch_npu.npu_moe_token_unpermute(permuted, positions)

    _same(fused, lambda x: x.repeat_interleave(2, 0) * kept.unsqueeze(1), torch.randn(4, 8))


@pytest.mark.parametrize("as_counts", [False, True], ids=["cumulative", "counts"])
def test_grouped_matmul_multiplies_each_group_with_its_weight(npu: torch.device, as_counts: bool) -> None:
    counts = torch.tensor([2, 0, 4])
    x, weight, gradient = torch.randn(6, 4), torch.randn(3, 4, 5), torch.randn(6, 5)
    groups = (counts if as_counts else counts.cumsum(0)).to(npu)
    options = {"group_list": groups, "group_list_type": int(as_counts)}
    out = torch_npu.npu_grouped_matmul([x.to(npu)], [weight.to(npu)], split_item=3, group_type=0, **options)[
        0
    ]
    parts = x.split(counts.tolist())
    torch.testing.assert_close(out.cpu(), torch.cat([p @ w for p, w in zip(parts, weight, strict=True)]))
    dweight = torch_npu.npu_grouped_matmul(
        [x.t().contiguous().to(npu)], [gradient.to(npu)], split_item=3, group_type=2, **options
    )[0]
    expected = [p.t() @ g for p, g in zip(parts, gradient.split(counts.tolist()), strict=True)]
    torch.testing.assert_close(dweight.cpu(), torch.stack(expected))


def test_a_fused_operator_without_reference_fails_loudly(npu: torch.device) -> None:
    logits = torch.randn(4, 8, device=npu)
    with pytest.raises(RuntimeError):
        torch_npu.npu_moe_gating_top_k_softmax(logits, None, 2)
