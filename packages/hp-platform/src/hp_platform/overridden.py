"""Modules whose forward is another function, under the class's own name: what ``platform.override_forward`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Module = Any
Forward = Callable[[Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

FORWARD_ATTRIBUTE = "_hp_forward"
"""Attribute of a module: what runs in the place of its forward."""
_CLASS_ATTRIBUTE = "_hp_overridden_class"
"""Where a class of modules keeps the generated one: it belongs to that class, and goes with it."""


def override(module: Module, method: str, forward: Forward) -> None:
    """Let ``forward(module, own, args, kwargs)`` run in the place of the module's ``method``.

    The class is exchanged for one derived from it: methods are looked up there, so hooks, compilers and copies treat the
    module as any other, and no function hangs on the instance that would keep it in a cycle. A method that hangs there
    already, as compilers put it, is what runs inside: it would hide the class's.
    """
    # Of the module itself: one that a compiler has made shows the attributes of the one in it as its own.
    attributes: dict[str, Any] = module.__dict__
    previous = attributes.get(FORWARD_ATTRIBUTE)
    if previous is not None:
        attributes[FORWARD_ATTRIBUTE] = _Around(forward, previous)
        return
    module.__class__ = _generated(type(module), method)
    hidden = attributes.pop(method, None)
    attributes[FORWARD_ATTRIBUTE] = forward if hidden is None else _Around(forward, _Hidden(hidden))


@dataclass(frozen=True)
class _Around:
    """A forward around another one."""

    outer: Forward
    inner: Forward

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def former(*args: Any, **kwargs: Any) -> Any:
            return self.inner(module, own, args, kwargs)

        return self.outer(module, former, args, kwargs)


@dataclass(frozen=True)
class _Hidden:
    """A method that stood on the module."""

    method: Callable[..., Any]

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.method(*args, **kwargs)


def _before_hidden(forward: Forward) -> Forward:
    """``forward`` without the method inside of it that stood on the module."""
    if not isinstance(forward, _Around):
        return forward
    outer, inner = forward.outer, forward.inner
    return outer if isinstance(inner, _Hidden) else _Around(outer, _before_hidden(inner))


def _generated(original: type, method: str) -> type:
    # Looked up in the class itself: a generated class must not serve for classes derived from it.
    found: type | None = vars(original).get(_CLASS_ATTRIBUTE)
    if found is not None:
        return found

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._hp_forward(self, getattr(super(made, self), method), args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickle finds classes by name, and finds the original under this one.
        make, of, *rest = super(made, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        if of and isinstance(of[0], type):
            return (_remade, (original, method, make, *of[1:]), *rest)
        # A class that says itself what copies are made of, as compilers' do: they put a method on the copy, too.
        outer = _before_hidden(self._hp_forward)
        return (_made_anew, (method, outer, original if make is made else make, *of), *rest)

    run.__name__ = run.__qualname__ = method
    made = type(
        original.__name__,
        (original,),
        {
            method: run,
            # Declared: what a module does not know, one that a compiler has made would put on the one in it.
            FORWARD_ATTRIBUTE: None,
            "__reduce_ex__": reduce,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        },
    )
    setattr(original, _CLASS_ATTRIBUTE, made)
    return made


def _remade(original: type, method: str, make: Callable[..., Any], *args: Any) -> Any:
    return make(_generated(original, method), *args)


def _made_anew(method: str, forward: Forward, make: Callable[..., Any], *args: Any) -> Any:
    module = make(*args)
    override(module, method, forward)
    return module
