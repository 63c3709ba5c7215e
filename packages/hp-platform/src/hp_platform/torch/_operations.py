"""Which operations below autograd torch's functions are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_scaled_mm")
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_MADE_OF: dict[Any, tuple[str, ...]] = {
    torch.matmul: _PRODUCTS,
    torch.Tensor.matmul: _PRODUCTS,
    torch.Tensor.__matmul__: _PRODUCTS,
    F.linear: _PRODUCTS,
    torch.einsum: _PRODUCTS,
    F.scaled_dot_product_attention: _ATTENTIONS,
    F.conv1d: ("convolution", "mkldnn_convolution"),
    F.conv2d: ("convolution", "mkldnn_convolution"),
    F.conv3d: ("convolution", "mkldnn_convolution"),
    F.layer_norm: ("native_layer_norm",),
    F.group_norm: ("native_group_norm",),
    F.batch_norm: ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"),
    F.softmax: ("_softmax",),
    torch.softmax: ("_softmax",),
    F.log_softmax: ("_log_softmax",),
    torch.log_softmax: ("_log_softmax",),
    F.dropout: ("native_dropout", "bernoulli"),
    F.embedding: ("embedding",),
    F.gelu: ("gelu",),
    F.silu: ("silu",),
    F.relu: ("relu",),
}
"""What their composition depends on (shapes, device, dtype) is not asked: all that can occur are named."""


def operations_of(function: Any) -> frozenset[Any]:
    """Overloads of a function, of a packet of overloads, or the overload itself; empty for what is not known."""
    if isinstance(function, torch._ops.OpOverload):
        return frozenset({function})
    if isinstance(function, torch._ops.OpOverloadPacket):
        return _overloads(function)
    try:
        names = _MADE_OF.get(function)
    except TypeError:  # cannot be a key
        return frozenset()
    if names is None:
        # A function that is one operation has its name: torch.mm, torch.Tensor.exp.
        name = getattr(function, "__name__", "")
        is_torchs = getattr(torch, name, None) is function or getattr(torch.Tensor, name, None) is function
        names = (name,) if is_torchs and hasattr(torch.ops.aten, name) else ()
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(overload for packet in packets if packet is not None for overload in _overloads(packet))


def can_be_kept(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """See :meth:`hp_platform.protocols.AutogradOps.can_be_kept`."""
    schema = operation._schema
    if schema.is_mutable or any(found.alias_info is not None for found in schema.returns):
        return False
    return not _draws(operation, args, kwargs) and "empty" not in schema.name


def _draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers. All kinds of attention are tagged as if they did, and do for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def _overloads(packet: Any) -> frozenset[Any]:
    return frozenset(getattr(packet, name) for name in packet.overloads())
