"""The decoder of :mod:`bench.models.llama` cut over a tensor-parallel group by hand, in the manner of Megatron-LM.

Plain local weights, and four autograd functions with the collectives written out (Shoeybi et al., arXiv 1909.08053; with the
sequence cut too: Korthikanti et al., arXiv 2205.05198; cross-entropy over a cut vocabulary: the first, section 3). Nothing
is checked and nothing can be changed: what a library adds to this is its overhead. n is the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

from bench.models.llama import Block, Llama, rotary

CUT_ROWS, CUT_COLUMNS = ("q", "k", "v", "gate", "up", "head", "embedding"), ("o", "down")
"""Weights (out, in) of which a rank has rows, and of which it has columns; the others are whole on every rank."""


def summed(x: Any) -> Any:
    """Over the ranks; the tensor may be overwritten."""
    if torch.compiler.is_compiling():
        return functional_collectives.wait_tensor(functional_collectives.all_reduce(x, "sum", _group()))
    dist.all_reduce(x)
    return x


def gathered(x: Any) -> Any:
    """Pieces (B, S/n, D) of the sequence -> (B, S, D)."""
    batch, length, dim = x.shape
    flat = x.contiguous().view(batch * length, dim)
    if torch.compiler.is_compiling():
        whole = functional_collectives.all_gather_tensor(flat, 0, _group())
        whole = functional_collectives.wait_tensor(whole)
    else:
        whole = flat.new_empty(dist.get_world_size() * batch * length, dim)
        dist.all_gather_into_tensor(whole, flat)
    return whole.view(-1, batch, length, dim).transpose(0, 1).reshape(batch, -1, dim)


def scattered(x: Any) -> Any:
    """Addends (B, S, D) -> a piece (B, S/n, D) of their sum."""
    batch, length, dim = x.shape
    n = dist.get_world_size()
    flat = x.view(batch, n, length // n, dim).transpose(0, 1).contiguous().view(-1, dim)
    if torch.compiler.is_compiling():
        piece = functional_collectives.reduce_scatter_tensor(flat, "sum", 0, _group())
        piece = functional_collectives.wait_tensor(piece)
    else:
        piece = flat.new_empty(flat.shape[0] // n, dim)
        dist.reduce_scatter_tensor(piece, flat)
    return piece.view(batch, length // n, dim)


def _group() -> Any:
    return dist.group.WORLD


class Copy(torch.autograd.Function):
    """In front of weights cut by rows: forward as it is, backward summed."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """A view."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Every rank's columns had a part in it."""
        return summed(gradient)


class Sum(torch.autograd.Function):
    """Behind weights cut by columns: forward summed, backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """(B, S, D) addends -> their sum."""
        return summed(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """The same on all ranks."""
        return gradient


class Gather(torch.autograd.Function):
    """Copy for a cut sequence: forward gathered, backward summed and cut."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """(B, S/n, D) -> (B, S, D)."""
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """(B, S, D) -> (B, S/n, D)."""
        return scattered(gradient)


class Scatter(torch.autograd.Function):
    """Sum for a cut sequence: forward summed and cut, backward gathered."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """(B, S, D) -> (B, S/n, D)."""
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """(B, S/n, D) -> (B, S, D)."""
        return gathered(gradient)


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits whose classes are cut: a maximum, and one sum of the two numbers per token."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        """(N, V/n) float32 that may be overwritten, (N,) -> ()."""
        highest = logits.max(-1).values
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        logits = logits.detach().sub_(highest[:, None])
        num_classes = logits.shape[1]
        local = targets - dist.get_rank() * num_classes
        elsewhere = (local < 0) | (local >= num_classes)
        local = local.masked_fill(elsewhere, 0)
        picked = logits.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0)
        exponentials = logits.exp_()
        both = torch.stack((picked, exponentials.sum(-1)))
        dist.all_reduce(both)
        picked, total = both
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, elsewhere)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """softmax - onehot, nothing travels."""
        softmax, local, elsewhere = ctx.saved_tensors
        softmax.scatter_add_(1, local[:, None], -(~elsewhere).to(softmax.dtype)[:, None])
        return softmax.mul_(gradient / softmax.shape[0]), None


@dataclass(frozen=True)
class Doors:
    """What stands in front of the cut weights, and behind them."""

    enter: Any
    leave: Any

    @classmethod
    def of(cls, *, sequence_parallel: bool) -> Doors:
        """For activations between blocks that are cut along the sequence, or whole."""
        return cls(Gather.apply, Scatter.apply) if sequence_parallel else cls(Copy.apply, Sum.apply)


class BlockByHand(Block):
    """One layer on local weights."""

    doors: Doors

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> (B, S, D), or (B, S/n, D) for both."""
        enter, leave = self.doors.enter, self.doors.leave
        x = x + leave(self.attention(enter(self.norm1(x)), cos, sin))
        return x + leave(self.feed_forward(enter(self.norm2(x))))


class LlamaByHand(Llama):
    """Tokens (B, S) -> logits (B, S, V/n)."""

    doors: Doors

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary."""
        num_rows = self.embedding.weight.shape[0]
        local = ids - dist.get_rank() * num_rows
        elsewhere = (local < 0) | (local >= num_rows)
        found = functional.embedding(local.masked_fill(elsewhere, 0), self.embedding.weight)
        x = self.doors.leave(found.masked_fill(elsewhere[..., None], 0))
        cos, sin = rotary(ids.shape[1], self.sizes.dim // self.sizes.heads, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.doors.enter(self.norm(x)))


def cut_by_hand(model: nn.Module, *, sequence_parallel: bool) -> nn.Module:
    """Leave a rank its pieces of the weights of a Llama or of a block, and put the doors in. In place."""
    doors = Doors.of(sequence_parallel=sequence_parallel)
    rank, n = dist.get_rank(), dist.get_world_size()
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in CUT_ROWS + CUT_COLUMNS:
            piece = module.weight.detach().chunk(n, 0 if kind in CUT_ROWS else 1)[rank]
            module.weight = nn.Parameter(piece.clone(memory_format=torch.contiguous_format))
        elif type(module) in (Block, Llama):
            module.__class__ = BlockByHand if type(module) is Block else LlamaByHand
            module.doors = doors
    return model


def sum_of_gradients(parameters: list[Any]) -> None:
    """Sum the gradients of weights that every rank has whole and has used on its piece of the sequence: one all-reduce."""
    flat = torch.cat([parameter.grad.view(-1) for parameter in parameters])
    dist.all_reduce(flat)
    for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = total.view_as(parameter)
