"""npu_fusion_attention, forward and backward, in the layouts BNSD, BSND, BSH, SBH and TND.

B batch, N heads, S sequence, D head dimension, H = N * D, T = sum of the sequence lengths of all documents.
Not emulated, and refused: pse, dropout, padding mask, prefix, sink, band sparse modes.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from npu_emulator.kernels._fused import reference

_LEFT_UP_CAUSAL, _RIGHT_DOWN_CAUSAL = 2, 3
_ALL_TOKENS = 2147483647
_STATISTICS_WIDTH = 8  # softmax_max and softmax_sum repeat each value eight times


@dataclass(frozen=True)
class _Call:
    """The arguments that forward and backward share."""

    head_num: int
    layout: str
    scale: float
    mask: Tensor | None
    sparse_mode: int
    query_ends: list[int] | None
    key_ends: list[int] | None

    def documents(self, query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
        """TND: the rows of each document in the query and in the key."""
        if self.query_ends is None or self.key_ends is None:
            raise ValueError("layout TND needs actual_seq_qlen and actual_seq_kvlen (cumulative)")
        if (self.query_ends[-1], self.key_ends[-1]) != (query.shape[0], key.shape[0]):
            raise ValueError(
                f"actual_seq_qlen ends with {self.query_ends[-1]} and actual_seq_kvlen with {self.key_ends[-1]}; "
                f"expected the number of tokens, {query.shape[0]} and {key.shape[0]}"
            )
        query_rows = [slice(a, b) for a, b in pairwise([0, *self.query_ends])]
        key_rows = [slice(a, b) for a, b in pairwise([0, *self.key_ends])]
        return list(zip(query_rows, key_rows, strict=True))

    def to_bnsd(self, x: Tensor, head_dim: int) -> Tensor:
        match self.layout:
            case "BNSD":
                return x
            case "BSND":
                return x.transpose(1, 2)
            case "BSH":
                return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
            case "SBH":
                return x.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)
        raise ValueError(f"input_layout={self.layout!r}; expected BNSD, BSND, BSH, SBH or TND")

    def from_bnsd(self, x: Tensor) -> Tensor:
        match self.layout:
            case "BNSD":
                return x
            case "BSND":
                return x.transpose(1, 2)
            case "BSH":
                return x.transpose(1, 2).flatten(2)
            case _:
                return x.permute(2, 0, 1, 3).flatten(2)

    def head_dim(self, query: Tensor) -> int:
        return query.shape[-1] // self.head_num if self.layout in ("BSH", "SBH") else query.shape[-1]

    def hidden(self, queries: int, keys: int) -> Tensor | None:
        """True where a query must not see a key. For the causal modes the 2048 x 2048 mask only stands for one."""
        if self.mask is None:
            return None
        if self.sparse_mode in (_LEFT_UP_CAUSAL, _RIGHT_DOWN_CAUSAL):
            shift = 0 if self.sparse_mode == _LEFT_UP_CAUSAL else keys - queries
            return torch.ones(queries, keys, dtype=torch.bool).triu(1 + shift)
        return self.mask.bool()


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"npu_fusion_attention: {name}={value!r} is not emulated")


def _probabilities(q: Tensor, k: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q k^T * scale) in float32, with the maximum and the sum of each row."""
    scores = q.float() @ k.float().transpose(-1, -2) * call.scale
    hidden = call.hidden(scores.shape[-2], scores.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    exponentials = (scores - maximum).exp()
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / total, maximum, total


def _forward_bnsd(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]  # grouped-query attention: each key head serves `group` query heads
    probabilities, maximum, total = _probabilities(q, k.repeat_interleave(group, 1), call)
    out = probabilities @ v.float().repeat_interleave(group, 1)
    statistics = (*maximum.shape[:-1], _STATISTICS_WIDTH)
    return out.to(q.dtype), maximum.expand(statistics), total.expand(statistics)


def _backward_bnsd(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dP - sum(dP * P)) * scale with dP = dout v^T."""
    group = q.shape[1] // k.shape[1]
    key, value = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    probabilities, _, _ = _probabilities(q, key, call)
    dp = dout.float() @ value.transpose(-1, -2)
    ds = probabilities * (dp - (dp * probabilities).sum(-1, keepdim=True)) * call.scale

    def sum_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    dq, dk = ds @ key, sum_group(ds.transpose(-1, -2) @ q.float())
    dv = sum_group(probabilities.transpose(-1, -2) @ dout.float())
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _document(x: Tensor, rows: slice) -> Tensor:
    """[T, N, D] -> [1, N, S, D] of one document."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _tokens(x: Tensor) -> Tensor:
    """[1, N, S, D] -> [S, N, D]."""
    return x.squeeze(0).transpose(0, 1)


@reference("npu_fusion_attention")
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _ALL_TOKENS,
    next_tockens: int = _ALL_TOKENS,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Returns (out, softmax_max, softmax_sum, an empty softmax_out, and three numbers for dropout)."""
    _refuse(pse=pse, padding_mask=padding_mask, prefix=prefix, sink=sink, dropout_mask=dropout_mask)
    _refuse(dropout=keep_prob != 1.0, sparse_mode=sparse_mode if sparse_mode not in (0, 1, 2, 3) else None)
    call = _Call(head_num, input_layout, scale, atten_mask, sparse_mode, actual_seq_qlen, actual_seq_kvlen)
    nothing = torch.empty(0, dtype=query.dtype)
    if input_layout == "TND":
        parts = [
            _forward_bnsd(_document(query, rows), _document(key, key_rows), _document(value, key_rows), call)
            for rows, key_rows in call.documents(query, key)
        ]
        out, maximum, total = (torch.cat([_tokens(part[i]) for part in parts]) for i in range(3))
        return out, maximum, total, nothing, 0, 0, 0
    dim = call.head_dim(query)
    out, maximum, total = _forward_bnsd(*(call.to_bnsd(x, dim) for x in (query, key, value)), call)
    return call.from_bnsd(out), maximum, total, nothing, 0, 0, 0


@reference("npu_fusion_attention_grad")
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale_value: float = 1.0,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (dquery, dkey, dvalue, and two empty tensors). Recomputes the probabilities."""
    call = _Call(
        head_num, input_layout, scale_value, atten_mask, sparse_mode, actual_seq_qlen, actual_seq_kvlen
    )
    if input_layout == "TND":
        gradients = [torch.zeros_like(x) for x in (query, key, value)]
        for rows, key_rows in call.documents(query, key):
            parts = _backward_bnsd(
                _document(query, rows),
                _document(key, key_rows),
                _document(value, key_rows),
                _document(dy, rows),
                call,
            )
            for gradient, part, where in zip(gradients, parts, (rows, key_rows, key_rows), strict=True):
                gradient[where] = _tokens(part)
        return *gradients, torch.empty(0), torch.empty(0)
    dim = call.head_dim(query)
    dq, dk, dv = _backward_bnsd(*(call.to_bnsd(x, dim) for x in (query, key, value, dy)), call)
    return call.from_bnsd(dq), call.from_bnsd(dk), call.from_bnsd(dv), torch.empty(0), torch.empty(0)
