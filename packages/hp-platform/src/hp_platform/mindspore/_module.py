"""The base of models on MindSpore: cells that are written like torch's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mindspore

from hp_platform.mindspore import _private
from hp_platform.mindspore._recording import ensure_recording


class Module(_private.FreelyNamedCell):
    """A MindSpore cell whose computation is ``forward``; parameters and sub-modules are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.set_train(True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hooks and forward."""
        ensure_recording()
        return super().__call__(*args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """MindSpore's name for :meth:`forward`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The computation; a subclass defines it."""
        raise RuntimeError(f"{type(self).__name__} defines no forward")

    def __setattr__(self, name: str, value: Any) -> None:
        tables = self.__dict__
        plain = isinstance(value, mindspore.Tensor) and not isinstance(value, mindspore.Parameter)
        if plain and name in tables.get("_params", ()):
            # A cell would copy the values into the parameter.
            raise TypeError(
                f"{type(self).__name__}.{name} is a parameter: assign a parameter, or use platform.set_parameter or platform.copy_"
            )
        if plain and name in tables.get("_buffers", ()):
            _private.buffers_of(self)[name] = value
            return
        super().__setattr__(name, value)


class ModuleList(Module):
    """Modules in a row, named ``"0"``, ``"1"`` and so on."""

    def __init__(self, modules: Iterable[mindspore.nn.Cell] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def append(self, module: mindspore.nn.Cell) -> ModuleList:
        """Add one at the end."""
        _private.cells_of(self)[str(len(self))] = module
        return self

    def extend(self, modules: Iterable[mindspore.nn.Cell]) -> ModuleList:
        """Add several at the end."""
        for module in modules:
            self.append(module)
        return self

    def __len__(self) -> int:
        return len(_private.cells_of(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(list(_private.cells_of(self).values()))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return ModuleList(list(self)[index])
        return list(self)[index]

    def __setitem__(self, index: int, module: mindspore.nn.Cell) -> None:
        _private.cells_of(self)[str(range(len(self))[index])] = module
