"""Mixture of experts: permute tokens by expert, unpermute, and the grouped matrix product.

T tokens, K experts per token, E experts, H hidden. `sorted_indices[t * K + k]` is the row of token t's k-th copy
in the permuted tensor; rows at or behind `num_out_tokens` were dropped.
"""

from itertools import pairwise

import torch
from torch import Tensor

from npu_emulator.kernels._fused import reference


def _refuse_padded(padded_mode: bool) -> None:
    if padded_mode:
        raise NotImplementedError("padded_mode=True is not emulated")


def _gather_rows(rows: Tensor, positions: Tensor) -> Tensor:
    """rows[positions], zero where the row was dropped."""
    positions = positions.long()
    kept = positions < rows.shape[0]
    return torch.where(
        kept.unsqueeze(-1), rows[positions.clamp(max=rows.shape[0] - 1)], torch.zeros((), dtype=rows.dtype)
    )


def _scatter_rows(values: Tensor, positions: Tensor, count: int) -> Tensor:
    """The inverse: row positions[i] becomes values[i]."""
    positions = positions.long()
    kept = positions < count
    out = torch.zeros(count, values.shape[-1], dtype=values.dtype)
    out[positions[kept]] = values[kept]
    return out


@reference("npu_moe_token_permute")
def permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """[T, H] and expert indices [T, K] -> copies sorted by expert [T * K, H], and where each copy went."""
    _refuse_padded(padded_mode)
    copies = 1 if indices.dim() == 1 else indices.size(1)
    order = torch.argsort(indices.reshape(-1), stable=True)
    sorted_indices = torch.argsort(order, stable=True)
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens[kept // copies], sorted_indices.to(torch.int32)


@reference("npu_moe_token_permute_grad")
def permute_grad(
    tokens: Tensor, grad_permuted: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    copies = 1 if indices.dim() == 1 else indices.size(1)
    return permute_grad_v2(grad_permuted, sorted_indices, tokens.shape[0], tokens.dtype, copies, padded_mode)


@reference("npu_moe_token_permute_grad_v2")
def permute_grad_v2(
    grad_permuted: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topk: int,
    padded_mode: bool = False,
) -> Tensor:
    """The gradient of a token is the sum over its copies."""
    _refuse_padded(padded_mode)
    copies = _gather_rows(grad_permuted, sorted_indices).reshape(tokens_size_0, num_topk, -1)
    return copies.sum(1).to(tokens_dtype)


@reference("npu_moe_token_unpermute")
def unpermute(
    permuted: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """[T * K, H] back to token order; with probs [T, K] the weighted sum of each token's copies, [T, H]."""
    _refuse_padded(padded_mode)
    copies = _gather_rows(permuted, sorted_indices)
    if probs is None:
        return copies
    return (copies.reshape(*probs.shape, -1) * probs.unsqueeze(-1)).sum(1).to(permuted.dtype)


@reference("_npu_moe_token_unpermute")
def unpermute_for_backward(
    permuted: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    return unpermute(permuted, sorted_indices, probs, padded_mode, restore_shape), permuted


@reference("npu_moe_token_unpermute_grad")
def unpermute_grad(
    permuted: Tensor,
    grad: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    rows, dtype = permuted.shape[0], permuted.dtype
    return unpermute_grad_v2(grad, sorted_indices, rows, dtype, probs, padded_mode, restore_shape, permuted)


@reference("npu_moe_token_unpermute_grad_v2")
def unpermute_grad_v2(
    grad: Tensor,
    sorted_indices: Tensor,
    permuted_size_0: int,
    permuted_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
    permuted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(gradient of the permuted rows, gradient of the probs)."""
    _refuse_padded(padded_mode)
    if probs is None:
        return _scatter_rows(grad.to(permuted_dtype), sorted_indices, permuted_size_0), torch.empty(0)
    assert permuted is not None, "the gradient of probs needs the permuted rows"
    weighted = (grad.unsqueeze(1) * probs.unsqueeze(-1)).flatten(0, 1).to(permuted_dtype)
    copies = _gather_rows(permuted, sorted_indices).reshape(*probs.shape, -1)
    grad_probs = (copies * grad.unsqueeze(1)).sum(-1).to(probs.dtype)
    return _scatter_rows(weighted, sorted_indices, permuted_size_0), grad_probs


_GROUP_ROWS, _GROUP_INNER = 0, 2  # group_type
_CUMULATIVE, _COUNTS = 0, 1  # group_list_type


@reference("npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | list[int] | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **other: object,
) -> list[Tensor]:
    """One product per expert.

    group_type 0 (forward): x [M, K] split by rows, weight [E, K, N] -> [M, N].
    group_type 2 (gradient of the weight): x [K', M] and weight [M, N], both split along M -> [E, K', N].
    """
    given = {name: value for name, value in other.items() if value not in (None, 0)}
    if given or len(x) != 1 or len(weight) != 1 or group_list is None:
        raise NotImplementedError(
            f"npu_grouped_matmul with {sorted(given)}, {len(x)} x and {len(weight)} weight tensors"
        )
    ends = [int(number) for number in group_list]
    counts = ends if group_list_type == _COUNTS else [b - a for a, b in pairwise([0, *ends])]
    match group_type:
        case 0:
            if sum(counts) > x[0].shape[0] or len(counts) != weight[0].shape[0]:
                raise ValueError(f"groups {counts} for {x[0].shape[0]} rows and {weight[0].shape[0]} experts")
            rows = x[0][: sum(counts)].split(counts)
            return [torch.cat([part @ one for part, one in zip(rows, weight[0], strict=True)])]
        case 2:
            parts = zip(x[0].split(counts, 1), weight[0].split(counts, 0), strict=True)
            return [torch.stack([left @ right for left, right in parts])]
    raise NotImplementedError(f"npu_grouped_matmul: group_type={group_type} is not emulated; 0 and 2 are")


@reference("npu_grouped_matmul.List")
def grouped_matmul_list(x: list[Tensor], weight: list[Tensor], **options: object) -> list[Tensor]:
    return grouped_matmul(x, weight, **options)  # type: ignore[arg-type]
