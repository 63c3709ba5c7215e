"""torch's own random functions on plain tensors, given to the stream of :mod:`hp_dtensor.random` inside of a block.

They follow the rules that DTensors follow, as tensors on a mesh of one rank, so every spelling is read alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hp_dtensor import random
from hp_dtensor._names.random import DRAWING
from hp_dtensor._torch.bodies import body_of
from hp_dtensor._torch.samples import SAMPLERS
from hp_dtensor.placements import REPLICATE
from hp_dtensor.rng.places import is_dtensor
from hp_dtensor.rules import RULES
from hp_dtensor.spec import make_spec


class _OneRank:
    """What specs need of a mesh, without processes."""

    shape = (1,)

    def __init__(self) -> None:
        self.interned: dict[Any, Any] = {}

    def get_coordinate(self) -> tuple[int, ...]:
        """The only one."""
        return (0,)


_RULES = {
    getattr(home, name): RULES[rule]
    for rule, names in DRAWING.items()
    for name in names.split()
    for home in (torch.Tensor, torch, torch.nn.functional)
    if hasattr(home, name)
}
_MAKERS: dict[Any, Any] = {torch.rand: random.rand, torch.randn: random.randn, torch.randint: random.randint}


class GlobalDraws(TorchFunctionMode):
    """See :func:`hp_dtensor.random.global_draws`."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh = _OneRank()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch that is called in the block."""
        kwargs = dict(kwargs or {})
        if func in _MAKERS:
            return _made(func, args, kwargs)
        if func in SAMPLERS:
            return SAMPLERS[func](*args, **kwargs)
        rule = RULES["scaled_dot_product_attention"] if _drops(func, args, kwargs) else _RULES.get(func)
        if rule is None or is_dtensor(args[0] if args else kwargs.get("input")):
            # Functions written in Python ask whether a block is open and hand themselves over: what they call belongs to it.
            body = body_of(func) if rule is None else None
            if body is None:
                return func(*args, **kwargs)
            with self:
                return body(*args, **kwargs)
        args, kwargs = rule.bind(args, kwargs)
        writes = kwargs.pop("inplace", False)
        outcome = rule.plan(*map(self._spec_of, args), **kwargs)
        assert outcome.run is not None, f"rule {rule.name!r} draws, so it runs something of its own"
        result = outcome.run(*args, **kwargs)
        if not writes:
            return result
        return args[0].copy_(result)

    def _spec_of(self, x: Any) -> Any:
        return make_spec(self._mesh, (REPLICATE,), tuple(x.shape)) if isinstance(x, torch.Tensor) else x


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is attention of plain tensors with dropout of its probabilities."""
    if func is not torch.nn.functional.scaled_dot_product_attention:
        return False
    p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return bool(p) and not any(map(is_dtensor, (*args, *kwargs.values())))


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.rand``, ``torch.randn`` and ``torch.randint``; their options where they mean something here."""
    for name in ("layout", "pin_memory", "names"):
        kwargs.pop(name, None)
    if kwargs.pop("out", None) is not None:
        raise ValueError("out= is not taken: use the result, or write it with copy_()")
    requires_grad = kwargs.pop("requires_grad", False)
    kwargs["device"] = str(kwargs.pop("device", None) or torch.get_default_device())
    if func is torch.randint:
        low, high, size = args if len(args) == 3 else (0, *args)
        made = random.randint(low, high, size, **{"dtype": torch.int64, **kwargs})
    else:
        size = kwargs.pop("size", args)
        kwargs["dtype"] = kwargs.get("dtype") or torch.get_default_dtype()
        made = _MAKERS[func](*(size if isinstance(size, tuple) else (size,)), **kwargs)
    result: torch.Tensor = made.requires_grad_(requires_grad)
    return result
