"""What stands at the doors of a module: arguments and results are brought to the placements of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.module_tensors import is_dtensor, shown_names, suggestion
from hp_dtensor.nest import map_leaves, rebuilt
from hp_dtensor.placements import Partial
from hp_dtensor.sharding_plan import Wish, Wishes


@dataclass(frozen=True)
class Signature:
    """The arguments of a call, as far as the function tells them."""

    names: tuple[str, ...]
    """Of those that may be given by position."""
    takes_more: bool
    """Whether further ones may be given by position."""
    keywords: tuple[str, ...] | None
    """All names that it takes; None: any."""


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature; of a builtin that tells none: anything."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return Signature((), True, None)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [parameter.kind for parameter in parameters]
    named = tuple(
        p.name
        for p in parameters
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    )
    return Signature(
        tuple(p.name for p in parameters if p.kind in by_position),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        None if inspect.Parameter.VAR_KEYWORD in kinds else named,
    )


def moved(x: Any, wish: Wish, what: str) -> Any:
    """A DTensor, or every DTensor in a nest, brought to its placements; anything else as it is."""

    def move(leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        if leaf.device_mesh != wish.mesh:
            raise ValueError(
                f"{what} lies on {leaf.device_mesh}, but its plan is for {wish.mesh}: bring it there first"
            )
        wish.spec_for(leaf.shape, what)
        return leaf.redistribute(placements=wish.placements)

    return map_leaves(move, x)


@dataclass(frozen=True)
class InputDoor:
    """A hook before forward that redistributes arguments. An object and no closure, so that modules can be copied."""

    what: str
    wishes: Wishes
    signature: Signature

    def check(self) -> None:
        """ValueError for arguments that forward does not take."""
        names, keywords = self.signature.names, self.signature.keywords
        if len(self.wishes.by_position) > len(names) and not self.signature.takes_more:
            raise ValueError(
                f"{self.what}: specs for {len(self.wishes.by_position)} arguments, but it takes {len(names)}: "
                f"{shown_names(names)}"
            )
        for name in self.wishes.by_name or ():
            if keywords is not None and name not in keywords:
                raise ValueError(f"{self.what}: it takes no argument {name!r}; {suggestion(name, keywords)}")

    def adjusted(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in their places; an argument is found by position and by name alike."""
        by_position, by_name = list(args), dict(kwargs)
        names = self.signature.names
        asked: list[tuple[int, str | None, Wish | None]] = [
            (position, names[position] if position < len(names) else None, wish)
            for position, wish in enumerate(self.wishes.by_position)
        ]
        for key, wish in (self.wishes.by_name or {}).items():
            asked.append((names.index(key) if key in names else len(by_position), key, wish))
        for position, name, wish in asked:
            if wish is None:
                continue
            if name is not None and name in by_name:
                by_name[name] = moved(by_name[name], wish, f"argument {name!r} of {self.what}")
            elif position < len(by_position):
                what = f"argument {position if name is None else repr(name)} of {self.what}"
                by_position[position] = moved(by_position[position], wish, what)
        return tuple(by_position), by_name

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.adjusted(args, kwargs)


@dataclass(frozen=True)
class OutputDoor:
    """A hook after forward that redistributes results, and then, if asked, hands them out as local tensors.

    Both in one hook: in two, which of them comes first would depend on the order in which they were registered.
    """

    what: str
    wishes: Wishes | None
    localize: bool

    def adjusted(self, output: Any) -> Any:
        """The results in their places. ValueError if they are not as many as their specs."""
        if self.wishes is not None:
            output = self._moved(output, self.wishes)
        return map_leaves(self._local, output) if self.localize else output

    def _local(self, x: Any) -> Any:
        if not is_dtensor(x):
            return x
        if any(isinstance(placement, Partial) for placement in x.placements):
            raise ValueError(
                f"{self.what} is asked for as a local tensor, but it is {x._spec}, and a rank's summand alone has no "
                f"meaning: give it a spec in output_plan"
            )
        return x.to_local()

    def _moved(self, output: Any, wishes: Wishes) -> Any:
        if wishes.by_name is not None:
            return self._moved_by_name(output, wishes.by_name)
        if not wishes.by_position:
            return output
        is_many = isinstance(output, (list, tuple))
        values = list(output) if is_many else [output]
        if len(values) != len(wishes.by_position):
            raise ValueError(
                f"{self.what}: got {len(values)} results for {len(wishes.by_position)} specs; give one per result, None "
                f"for those to leave alone"
            )
        for i, wish in enumerate(wishes.by_position):
            if wish is not None:
                values[i] = moved(values[i], wish, f"result {i} of {self.what}")
        return rebuilt(output, values) if is_many else values[0]

    def _moved_by_name(self, output: Any, by_name: Mapping[str, Wish | None]) -> Any:
        if not isinstance(output, dict):
            raise ValueError(
                f"{self.what}: specs by name are for a result that is a dict, got {type(output).__name__}"
            )
        missing = [name for name in by_name if name not in output]
        if missing:
            raise ValueError(
                f"{self.what}: there is no result {missing[0]!r}; {suggestion(missing[0], map(str, output))}"
            )
        changed = {
            name: moved(output[name], wish, f"result {name!r} of {self.what}")
            for name, wish in by_name.items()
            if wish is not None
        }
        result = output.copy()
        for name, value in changed.items():
            result[name] = value
        return result

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return self.adjusted(output)
