"""``compile_block``: the forward of a module whose layers were cut, as one compiled graph with its collectives in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.module_tensors import is_dtensor
from hp_platform import get_platform, require
from hp_platform.forwards import check_forward
from hp_tp.styles.door import refused
from hp_tp.styles.placing import local_of

Module = Any


def compile_block(module: Module, **options: Any) -> Module:
    """Compile the forward of a module that contains layers in parallel styles, in place; returns it.

    While it runs, all parameters inside are this rank's plain pieces, so what is compiled knows no DTensors, and the graph goes
    on through the collectives at the doors, forward and backward. Parameters stay DTensors for everybody else::

        parallelize_module(model, mesh["tp"], plan)
        for block in model.layers:
            compile_block(block)

    Args:
        module: usually one of the repeated blocks of a model. Its tensor arguments and results must be plain, and what goes from
            style to style inside, too: SequenceParallel(use_local_output=True, local=True), and
            ColwiseParallel(input_layouts=Shard(1)) behind it. Pieces must be equal. Of the plans of
            :func:`hp_tp.plan_for` those with sequence_parallel=False are such, where attention runs on local heads and the model
            itself owns no parameters; the others let DTensors go from layer to layer.
        options: those of torch.compile, such as ``mode`` and ``dynamic``.

    Communication: none here; in calls that of the styles. NotImplementedError where the framework or device compiles
    nothing; TypeError if ``module`` is none; ValueError if it has no forward, as a ModuleList, and for a call with DTensors; at the
    first call the compiler's error, where forward is not one graph.
    """
    platform = get_platform()
    if not platform.is_module(module):
        raise TypeError(f"compile_block takes a module, got {type(module).__name__}")
    check_forward(platform, module, "compile_block")
    places = [
        (owner, name)
        for _, owner in platform.named_modules(module)
        for name, _ in platform.named_parameters(owner, recurse=False, remove_duplicate=False)
    ]
    require(platform, "traced_collectives", what="compile_block")
    forward = _Compiled(places, options)
    forward.prepare()
    platform.override_forward(module, forward)
    return module


class _Compiled:
    """A compiled forward, for which DTensors step aside."""

    def __init__(self, places: list[tuple[Module, str]], options: dict[str, Any]) -> None:
        self.places, self.options = places, options
        self.run: Callable[..., Any] | None = None
        self.setters: list[Callable[[Any], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files have the places alone: what was compiled is made again at their first call.
        return {"places": self.places, "options": self.options, "run": None, "setters": []}

    def prepare(self) -> Callable[..., Any]:
        """What runs: options that the compiler does not take are refused here."""
        platform = get_platform()
        self.setters = [platform.parameter_setter(owner, name) for owner, name in self.places]
        self.run = platform.compile(_run, **self.options)
        return self.run

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        platform = get_platform()
        for name, x in (*enumerate(args), *kwargs.items()):
            if is_dtensor(x):
                raise refused(
                    f"compile_block of {type(module).__name__}",
                    f"argument {name!r} is a DTensor of {x._spec}, and compiled code takes and gives plain pieces: apply a "
                    f"plan in which plain tensors go from layer to layer, such as plan_for(model, sequence_parallel=False) where the "
                    f"model itself owns no parameters, or leave this module uncompiled",
                )
        run = self.prepare() if self.run is None else self.run
        before = [platform.get_parameter(owner, name) for owner, name in self.places]
        try:
            for put, value in zip(self.setters, before, strict=True):
                put(local_of(value))
            return run(own, args, kwargs)
        finally:
            for put, value in zip(self.setters, before, strict=True):
                put(value)


def _run(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is compiled. Doors keep things with the tensors that they get: these shall be the trace's own, not the caller's."""
    platform = get_platform()
    args = tuple(platform.reshape(x, tuple(x.shape)) if platform.is_tensor(x) else x for x in args)
    return own(*args, **kwargs)
