"""What a unit's call is given: cast, and noticed by backward when all of its gradients are known."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DTensor
from hp_fsdp.nodes import inputs_node
from hp_fsdp.states import Uses
from hp_fsdp.unit import Unit
from hp_platform.containers import ATOMS, map_tensors, tensors_in
from hp_platform.platform import Platform

Given = tuple[tuple[Any, ...], dict[str, Any]]


def cast_floating(platform: Platform, value: Any, dtype: Any) -> Any:
    """``value`` with all floating-point tensors in it in ``dtype``."""

    def cast(x: Any) -> Any:
        given = x.dtype
        return x if given == dtype or not platform.is_floating(given) else platform.cast(x, dtype)

    return map_tensors(platform.is_tensor, cast, value)


class Inputs:
    """Of one unit. The common case, tensors beside each other and what is none, takes the host no search."""

    def __init__(self, unit: Unit) -> None:
        self.platform = unit.platform
        self._node = inputs_node(unit.platform, unit)
        self._tensor: Any = unit.platform.Tensor
        self._plain = ATOMS | {self._tensor}
        self.first: Any = None
        """What the running call was given that asks for a gradient, behind the node; the first of them."""

    def cast(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: Any) -> Given:
        """Floating-point tensors in ``dtype``."""
        if not self._are_plain(args, kwargs):
            found: Given = cast_floating(self.platform, (args, kwargs), dtype)
            return found
        if all([x.dtype == dtype for x in args if type(x) is self._tensor]):  # noqa: C419
            return args, kwargs
        return tuple([cast_floating(self.platform, x, dtype) for x in args]), kwargs

    def notice(self, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Uses) -> Given:
        """Put what asks for a gradient behind a node; see :class:`hp_fsdp.hooks.UnitHooks`."""
        if not self._are_plain(args, kwargs):
            found: Given = self._notice_in((args, kwargs), uses)
            return found
        places = [at for at, x in enumerate(args) if type(x) is self._tensor]
        flags = self.platform.requires_grads([args[at] for at in places])
        places = [at for at, flag in zip(places, flags, strict=True) if flag]
        outputs = self._behind_node([args[at] for at in places], uses)
        if not places:
            return args, kwargs
        noticed = list(args)
        for at, x in zip(places, outputs, strict=True):
            noticed[at] = x
        return tuple(noticed), kwargs

    def _are_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        plain = self._plain
        return not kwargs and all([type(x) in plain for x in args])  # noqa: C419 (a generator takes longer)

    def _behind_node(self, inputs: list[Any], uses: Uses) -> Any:
        if not inputs:
            self.first = None
            return ()
        uses.takes_gradients = True
        outputs = self._node.apply(uses, *inputs)
        self.first = outputs[0]
        return outputs

    def _notice_in(self, value: Any, uses: Uses) -> Any:
        platform = self.platform
        inputs = [x for x in tensors_in(platform.is_tensor, value) if platform.requires_grad(x)]
        # The graph is that of local tensors.
        outputs = self._behind_node([x.to_local() if isinstance(x, DTensor) else x for x in inputs], uses)
        if not inputs:
            return value
        rest = iter(outputs)

        def pass_on(x: Any) -> Any:
            if not platform.requires_grad(x):
                return x
            if not isinstance(x, DTensor):
                return next(rest)
            return DTensor.from_local(next(rest), x.device_mesh, x.placements, shape=tuple(x.shape))

        return map_tensors(platform.is_tensor, pass_on, value)
