"""What a framework or device may lack, by name. ``platform.supports(name)`` asks, :func:`hp_platform.require` insists."""

from __future__ import annotations

from typing import Final

CAPABILITIES: Final[dict[str, str]] = {
    "bfloat16_compute": "matmul, sums and activations in bfloat16; without it use float16 or float32",
    "float64_compute": "matmul and sums in float64; without it use float32",
    "write_into_view": "copy_ and collectives whose target is a view of a larger tensor; without it write whole tensors",
    "storage_views": "several tensors in one storage that is resized as one, each with a version count of its own; without it "
    "each tensor has a storage",
    "alias": "a tensor over part of another one's memory whose storage and version count are its own; without it keep copies",
    "stand_ins": "tensors that are made when something is done with them; without it make them before",
    "in_place_arithmetic": "the framework's own add_ and += change the tensor; without it use platform.add_ and the like",
    "traced_collectives": "collectives that a compiler records as a part of its graph; without it code with collectives runs uncompiled",
    "coalesced": "several collectives in one launch without a copy; without it they are fused by copying",
    "exchange": "all_to_all sends a block to its rank only; without it everything goes to everybody, so reduce instead",
    "peer_memory": "devices of one machine copy from each other's memory beside kernels; without it use collectives",
    "recorded_work": "work that comes again on the same memory is started by one launch; without it launch by launch",
    "numbers_on_device": "kernels read the numbers of an update where they lie on the device; without it the host reads them",
    "out_products": "products written into given memory; without it they are made anew and copied there",
    "streams": "work on side streams; without it streams and events do nothing",
    "memory_stats": "the allocator counts bytes; without it memory is the resident memory of the process",
    "version_counter": "in-place writes are counted; without it version() is 0",
    "backward_turns": "of what is ready in backward that runs first which was recorded last, and it can be told otherwise; without it the "
    "framework's own order is all there is",
    "double_backward": "backward of a backward, grad(create_graph=True); without it give the second derivative as a formula of its own",
    "undefined_gradients": "what is before a Function whose backward gives only None is walked all the same; without it give zeros",
    "storage_resize": "free a tensor's memory and get it back under the same tensor object; without it use set_data_",
    "meta_tensors": "tensors with shape and dtype but no memory; without it make them on cpu",
    "async_collectives": "collectives that run while the host goes on; without it each has ended when it returns",
    "reduce_float64": "all_reduce and reduce_scatter in float64; without it reduce in float32",
    "torch_checkpoint": "torch.distributed.checkpoint reads (by unpickling) and writes DTensors; without it use hp_dtensor.save",
    "optimizer_state": "the framework's own optimizers keep param_groups and state by parameter; without it use one that does (any "
    "object with both), or save what the optimizer has as a module, its own parameters",
    "fused_adamw": "one kernel that updates a list of tensors by AdamW; without it leave out fused=True",
    "operation_dispatch": "operations are caught below autograd, one by one; without it checkpoints recompute all of a function",
    "function_modes": "the framework's functions are caught in a block, also on plain tensors; without it call hp_dtensor.random's own",
    "function_dispatch": "operations on a tensor subclass are caught at function level; without it call the functions of hp_dtensor",
}
"""Every capability, with what it means and the way out where it is missing."""


def check_known(name: str) -> None:
    """Raise ValueError for a name that is not a capability: a misspelt question must not answer "no"."""
    if name not in CAPABILITIES:
        raise ValueError(f"unknown capability {name!r}; known ones are {', '.join(sorted(CAPABILITIES))}")
