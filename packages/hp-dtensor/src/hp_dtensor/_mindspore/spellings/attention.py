"""FlashAttentionScore, which has no kernel on cpu, in any layout but that of packed sequences."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from hp_dtensor._mindspore.composed.attention import attention
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling

_ALL = 2147483647
"""As many tokens before or after as there are."""
_LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")
_BNSD = 1
_GIVEN_MASKS, _CAUSAL, _CAUSAL_FROM_THE_END = (0, 1), 2, 3
_COMPRESSED = 2048
"""Rows and columns of the mask that the kernel wants for a causal one."""


@spelling("scaled_dot_product_attention", "FlashAttentionScore")
def _flash_attention_score(
    operation: Operation,
    q: Any,
    k: Any,
    v: Any,
    real_shift: Any = None,
    drop_mask: Any = None,
    padding_mask: Any = None,
    mask: Any = None,
    prefix: Any = None,
    lengths_of_q: Any = None,
    lengths_of_k: Any = None,
    head_num: int = 1,
    keep_prob: float = 1.0,
    scale: float = 1.0,
    pre_tokens: int = _ALL,
    next_tokens: int = _ALL,
    inner_precise: int = 0,
    layout: int = _BNSD,
    sparse_mode: int = 0,
) -> Any:
    """The kernel's mask is true where a key is not seen."""
    name = _LAYOUTS[layout]
    given = (real_shift, drop_mask, padding_mask, prefix, lengths_of_q, lengths_of_k)
    if any(x is not None for x in given) or name == "TND" or sparse_mode > _CAUSAL_FROM_THE_END:
        raise NotImplementedError(
            f"mindspore {mindspore.__version__}: FlashAttentionScore of DTensors takes query, key, value and attn_mask, sparse_mode "
            f"0 to 3, and the layouts BSH, BNSD, SBH and BSND; got layout {name}, sparse_mode {sparse_mode}. Put what else shall "
            f"not be seen into attn_mask, or work on x.to_local()"
        )
    size = q.shape[-1] if name in ("BNSD", "BSND") else q.shape[-1] // head_num
    q, k, v = (_as_bnsd(x, name, size) for x in (q, k, v))
    lengths = (q.shape[2], k.shape[2])
    is_causal = sparse_mode == _CAUSAL or (sparse_mode == _CAUSAL_FROM_THE_END and lengths[0] == lengths[1])
    seen = None
    if not is_causal:
        seen = _seen(mask, sparse_mode, pre_tokens, next_tokens, lengths)

    def local(
        q: Any, k: Any, v: Any, seen: Any = None, p: float = 0.0, is_causal: bool = False, **named: Any
    ) -> Any:
        if is_on_cpu(q):
            return attention(q, k, v, seen, p, is_causal, **named)
        hidden = None if seen is None else (~seen).astype(mindspore.uint8)
        if is_causal:
            hidden = ops.triu(ops.ones((_COMPRESSED, _COMPRESSED), mindspore.uint8), 1)
        rest = (
            q.shape[1],
            1.0,
            named["scale"],
            _ALL,
            _ALL,
            inner_precise,
            _BNSD,
            _CAUSAL if is_causal else 0,
        )
        return operation.native(q, k, v, None, None, None, hidden, None, None, None, *rest)[3]

    y = operation.follow(
        "scaled_dot_product_attention",
        local,
        q,
        k,
        v,
        seen,
        round(1 - keep_prob, 15),
        is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return None, None, None, _from_bnsd(y, name)


def _as_bnsd(x: Any, layout: str, size: int) -> Any:
    if layout == "BNSD":
        return x
    if layout == "SBH":
        x = x.transpose(0, 1)
    if layout != "BSND":
        x = x.reshape((x.shape[0], x.shape[1], x.shape[2] // size, size))
    return x.transpose(1, 2)


def _from_bnsd(y: Any, layout: str) -> Any:
    if layout == "BNSD":
        return y
    y = y.transpose(1, 2)
    if layout == "BSND":
        return y
    y = y.reshape((y.shape[0], y.shape[1], y.shape[2] * y.shape[3]))
    return y.transpose(0, 1) if layout == "SBH" else y


def _seen(mask: Any, sparse_mode: int, before: int, after: int, lengths: tuple[int, int]) -> Any:
    """Which keys each query sees; None: all. Without a mask the kernel does not look at the numbers of tokens."""
    num_queries, num_keys = lengths
    if sparse_mode == _CAUSAL_FROM_THE_END:
        return mindspore.Tensor(np.tri(num_queries, num_keys, num_keys - num_queries, dtype=np.bool_))
    if mask is None:
        return None
    seen = mask == 0
    if sparse_mode == 0 and (before < num_queries - 1 or after < num_keys - 1):
        distance = np.arange(num_keys)[None, :] - np.arange(num_queries)[:, None]
        seen = seen & mindspore.Tensor((distance <= after) & (distance >= -before))
    return seen
