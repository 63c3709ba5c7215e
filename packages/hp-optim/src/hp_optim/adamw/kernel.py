"""One launch of AdamW: the hyperparameters of a group, and tensors that are in the same step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hp_optim.groups import Group
from hp_optim.offload.home import StateHome
from hp_optim.offload.streaming import OFFLOAD_BUCKET, Lists, Streamed
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MAX_EXP_AVG_SQ = "max_exp_avg_sq"


def moments(group: Group) -> tuple[str, ...]:
    """Keys of the state of a parameter, as torch's optimizers call them."""
    return (EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ) if group["amsgrad"] else (EXP_AVG, EXP_AVG_SQ)


def state_dtype(platform: Platform, parameter: Tensor, gradient: Tensor) -> Any:
    """The wider of both: the float32 of a ``main_grad`` of a bfloat16 parameter."""
    own, other = parameter.dtype, gradient.dtype
    return other if platform.itemsize(other) > platform.itemsize(own) else own


def computed_dtype(platform: Platform, parameter: Any, state: Any) -> Any:
    """In which a step is made of a parameter and state of these dtypes: neither is rounded to the other's."""
    if parameter == state:
        return state
    own, other = platform.itemsize(parameter), platform.itemsize(state)
    if own == other:  # bfloat16 and float16
        return platform.dtype("float32")
    return parameter if own > other else state


class Launches:
    """The tensors of one step of a group."""

    def __init__(self, platform: Platform, group: Group, home: StateHome) -> None:
        self.platform = platform
        self.group = group
        self.home = home
        self._together: dict[Any, list[list[Tensor]]] = {}

    def add(self, device: str, count: int, target: Tensor, gradient: Tensor, state: Sequence[Tensor]) -> None:
        """``target``, which makes its step number ``count``; ``state`` has a tensor for each of :func:`moments`."""
        self.add_all(device, count, [target], [gradient], [[value] for value in state])

    def add_all(
        self,
        device: str,
        count: int,
        targets: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Sequence[Sequence[Tensor]],
    ) -> None:
        """Several of one dtype (at least one); ``state`` has a list for each of :func:`moments`."""
        key = (device, count, targets[0].dtype, state[0][0].dtype)
        lists = self._together.get(key)
        if lists is None:
            lists = self._together[key] = [[] for _ in range(2 + len(state))]
        for values, more in zip(lists, (targets, gradients, *state), strict=True):
            values.extend(more)

    def run(self) -> None:
        """One launch for all that are in the same step, of the same dtypes and on one device; of state on the host one per bucket."""
        for (device, count, _, dtype), (params, grads, *state) in self._together.items():
            transfers = self.home.transfers(device)
            if transfers is None:
                self._update(count, dtype, (params, grads), state)
            else:
                nbytes = self.group[OFFLOAD_BUCKET]
                streamed = Streamed(self.platform, transfers, device, nbytes, (params, grads), state)
                streamed.run(partial(self._update, count, dtype))

    def _update(self, count: int, dtype: Any, beside: Lists, state: Lists) -> None:
        """In the wider dtype, mostly that of the state: what is narrower is widened for it, and the result rounded once."""
        platform, group, (params, grads) = self.platform, self.group, beside
        wide = computed_dtype(platform, params[0].dtype, dtype)
        is_narrow = params[0].dtype != wide
        targets = platform.foreach_cast(params, wide) if is_narrow else params
        if any(grad.dtype != wide for grad in grads):
            grads = platform.foreach_cast(grads, wide)
        moved = state if dtype == wide else [platform.foreach_cast(xs, wide) for xs in state]
        beta1, beta2 = group["betas"]
        platform.adamw_(
            targets,
            grads,
            moved[0],
            moved[1],
            moved[2] if len(moved) > 2 else (),
            step=count,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            fused=group["fused"],
        )
        if is_narrow:
            platform.foreach_copy_(params, targets)
        if moved is not state:
            for xs, values in zip(state, moved, strict=True):
                platform.foreach_copy_(xs, values)
