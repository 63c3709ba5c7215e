"""On a rank: forward and backward of one side of `tp`. All sides have the same values, and take and give the same tensors.

bfloat16 (float32 without GPUs). At the end of a step all gradients are as an optimizer wants them: those of norms over a cut
sequence, which are addends, are summed, on all sides.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bench.cases.fsdp_training import device, initialize
from bench.cases.tp_settings import Family, Part, Side


@dataclass(frozen=True)
class Inputs:
    """Of one length; no side changes them, and gradients of ``leaves`` are dropped after a step."""

    arguments: tuple[Any, ...]
    target: Any
    """The gradient of a layer's output, or the tokens to predict."""
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, family: Family, length: int) -> Inputs:
        """The same for all sides; on a cut sequence this rank's piece."""
        import torch

        from bench.models.llama import rotary

        sizes, generator = family.sizes, torch.Generator(device()).manual_seed(1)

        def tokens() -> Any:
            return torch.randint(sizes.vocabulary, (1, length), device=device(), generator=generator)

        def activations() -> Any:
            x = torch.randn((1, length, sizes.dim), device=device(), generator=generator).to(dtype())
            if family.sequence_parallel:
                world = torch.distributed.get_world_size()
                x = x.chunk(world, 1)[torch.distributed.get_rank()].contiguous()
            return x

        if family.part is Part.MODEL:
            return cls((tokens(),), tokens().flatten(), ())
        x = activations().requires_grad_()
        if family.part is Part.LOSS:
            return cls((x,), tokens().flatten(), (x,))
        turns = rotary(length, sizes.dim // sizes.heads, torch.device(device()), dtype())
        return cls((x, *turns), activations(), (x,))


class Built:
    """A side's module, ready to run."""

    def __init__(self, side: Side, family: Family) -> None:
        import torch

        gc.collect()
        before = _allocated()
        self.module = _module(side, family)
        gc.collect()
        self.nbytes = _allocated() - before
        self.parameters: dict[str, Any] = dict(self.module.named_parameters())
        self._run = _runs(side, family, self.module)
        self._is_by_hand = side is Side.LIMIT and family.part is not Part.LOSS
        self._whole = [
            p for p in self.parameters.values() if p.ndim == 1 and family.sequence_parallel
        ]  # the norms' weights
        for block in self._blocks() if family.compiled else ():
            _compile(side, block)
        self._torch = torch

    def _blocks(self) -> list[Any]:
        return list(getattr(self.module, "blocks", [self.module]))

    def backward(self, inputs: Inputs) -> Any:
        """Forward and backward, gradients summed where they are addends; the loss, or the layer's output."""
        result = self._run(inputs)
        if not self._is_by_hand:
            for parameter in self.parameters.values():
                _lay_gradient_as(parameter)
        elif self._whole:
            from bench.models.by_hand import sum_of_gradients

            sum_of_gradients(self._whole)
        return result

    def step(self, inputs: Inputs) -> None:
        """And gradients are dropped, as an optimizer would do it last."""
        self.backward(inputs)
        for leaf in (*self.parameters.values(), *inputs.leaves):
            leaf.grad = None

    def results(self, inputs: Inputs) -> Iterator[tuple[str, Any]]:
        """What comes out, and the gradients, of this rank: the sides cut alike."""
        result = self.backward(inputs).detach()
        # A layer's output is this rank's piece; a loss may still lie as summands.
        yield "what comes out", result.full_tensor() if hasattr(result, "full_tensor") else result
        for name, leaf in (*self.parameters.items(), *(("x", leaf) for leaf in inputs.leaves)):
            yield f"the gradient of {name}", _local(leaf.grad)
            leaf.grad = None


def _compile(side: Side, block: Any) -> None:
    if side is Side.OURS:
        _Library.of(side).styles.compile_block(block, dynamic=False)
    else:
        block.compile(dynamic=False)


def dtype() -> Any:
    """Of parameters and activations."""
    import torch

    return torch.bfloat16 if device() == "cuda" else torch.float32


def _allocated() -> int:
    return requested_bytes("current") if device() == "cuda" else 0


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def _lay_gradient_as(parameter: Any) -> None:
    """Of a sharded parameter. Torch leaves addends to the optimizer, whose first look would sum them."""
    wanted = getattr(parameter, "placements", None)
    if wanted is not None and tuple(parameter.grad.placements) != tuple(wanted):
        parameter.grad = parameter.grad.redistribute(placements=wanted)


# --------------------------------------------------------------------------------------------------------------- modules
def _module(side: Side, family: Family) -> Any:
    """With the values that all sides begin with, cut."""
    import torch

    from bench.models.llama import Block, Llama

    with torch.device("meta"):
        if family.part is Part.LAYER:
            module: Any = Block(family.sizes)
        elif family.part is Part.MODEL:
            module = Llama(family.sizes)
        else:
            module = torch.nn.Linear(family.sizes.dim, family.sizes.vocabulary, bias=False)
    module = module.to(dtype())
    initialize(torch, module, iter(range(10**6)))
    if side is Side.LIMIT and family.part is not Part.LOSS:
        from bench.models.by_hand import cut_by_hand

        return cut_by_hand(module, sequence_parallel=family.sequence_parallel)
    library = _Library.of(side)
    mesh = library.meshes.init_device_mesh(
        device(), (torch.distributed.get_world_size(),), mesh_dim_names=("tp",)
    )
    return library.styles.parallelize_module(module, mesh, library.plan(family, prepares=side is Side.PEER))


@dataclass(frozen=True)
class _Library:
    """Ours or torch's: the names are the same."""

    styles: Any
    placements: Any
    meshes: Any

    @classmethod
    def of(cls, side: Side) -> _Library:
        peer = side is Side.PEER
        names = (
            ("torch.distributed.tensor.parallel", "torch.distributed.tensor", "torch.distributed.device_mesh")
            if peer
            else ("hp_tp", "hp_dtensor", "hp_platform")
        )
        return cls(*map(importlib.import_module, names))

    def plan(self, family: Family, *, prepares: bool) -> Any:
        """Styles by name.

        What several weights take is made whole once. Ours sees to it by itself; torch's would do it, and sum the gradients, for
        every weight, so there (``prepares``) a style in front of all of them does.
        """
        styles, whole = self.styles, self.placements.Replicate()
        between = self.placements.Shard(1) if family.sequence_parallel else whole
        taken = whole if prepares else between
        head = styles.ColwiseParallel(
            input_layouts=between, output_layouts=self.placements.Shard(-1), use_local_output=False
        )
        if family.part is Part.LOSS:
            return head

        def taking(*layouts: Any) -> Any:
            desired = tuple(layout and whole for layout in layouts)
            return styles.PrepareModuleInput(input_layouts=layouts, desired_input_layouts=desired)

        plan: dict[str, Any] = {}
        overlap = {"overlap": True} if family.overlap and not prepares else {}
        if prepares:
            plan |= {"attention": taking(between, None, None), "feed_forward": taking(between)}
        for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
            plan[name] = styles.ColwiseParallel(input_layouts=taken, **overlap)
        for name in ("attention.o", "feed_forward.down"):
            plan[name] = styles.RowwiseParallel(output_layouts=between, **overlap)
        if family.sequence_parallel:
            # Ours compiles what goes on in plain tensors, torch's DTensors too.
            options = {"use_local_output": True} if family.compiled and not prepares else {}
            plan |= {name: styles.SequenceParallel(**options) for name in ("norm1", "norm2")}
        if family.part is Part.LAYER:
            return plan
        ends = {
            "embedding": styles.RowwiseParallel(input_layouts=whole, output_layouts=between),
            "head": head,
        } | ({"norm": styles.SequenceParallel()} if family.sequence_parallel else {})
        return ends | {f"blocks.*.{name}": style for name, style in plan.items()}


# --------------------------------------------------------------------------------------------------------------- running
def _runs(side: Side, family: Family, module: Any) -> Callable[[Inputs], Any]:
    if family.part is Part.LAYER:
        return functools.partial(_run_layer, module)
    if family.part is Part.LOSS and side is Side.OURS:
        return functools.partial(_run_fused, module, _Library.of(side).styles.linear_cross_entropy)
    if side is Side.LIMIT and family.part is Part.MODEL:
        return functools.partial(_run_by_hand, module)
    return functools.partial(_run_with_loss, module, _Library.of(side).styles.loss_parallel)


def _run_layer(module: Any, inputs: Inputs) -> Any:
    y = module(*inputs.arguments)
    y.backward(inputs.target)
    return y


def _run_with_loss(module: Any, context: Callable[[], AbstractContextManager[Any]], inputs: Inputs) -> Any:
    import torch

    with context():
        logits = module(*inputs.arguments)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), inputs.target)
        loss.backward()
    return loss


def _run_by_hand(module: Any, inputs: Inputs) -> Any:
    from bench.models.by_hand import CrossEntropy

    loss: Any = CrossEntropy.apply(module(*inputs.arguments).flatten(0, 1).float(), inputs.target)
    loss.backward()
    return loss


def _run_fused(module: Any, loss_of: Callable[..., Any], inputs: Inputs) -> Any:
    (hidden,) = inputs.arguments
    loss = loss_of(hidden.flatten(0, 1), module.weight, inputs.target)
    loss.backward()
    return loss


def requested_bytes(which: str) -> int:
    """What tensors take, ``"current"`` or ``"peak"``, as it was asked for: blocks are larger by up to 1 MiB, as earlier ones left room."""
    import torch

    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))
