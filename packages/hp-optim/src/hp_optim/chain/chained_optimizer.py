"""``ChainedOptimizer``: several optimizers of one model, stepped, scheduled and saved as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hp_dtensor.states.likeness import like_named
from hp_dtensor.states.optimizer_names import NamedOptimizer
from hp_dtensor.states.optimizer_state import load_optimizer, read_optimizer
from hp_dtensor.states.options import StateDictOptions
from hp_dtensor.states.values import parameters_by_name
from hp_optim.base import STEP, gradient_of
from hp_optim.chain import flat_names
from hp_optim.chain.chain_state import ChainState
from hp_optim.checks import PARAMS, check_current
from hp_optim.make_class import make_optimizer_class
from hp_platform.platform import get_platform

if TYPE_CHECKING:
    from hp_optim.base import _Ground
    from hp_optim.chain.routing import Routing
else:
    _Ground = object


class OptimizerChain(_Ground):
    """Optimizers of one model as one. On torch a ``torch.optim.Optimizer``: schedulers, GradScaler and checkpoints take it.

    Args:
        model: whose parameters' names the state is kept under; made before, sharded if it will be.
        optimizers: name -> optimizer, in the order in which they step: ``AdamW``, ``Muon``, or any object with
            ``param_groups``, ``state``, ``step`` and ``zero_grad`` that keeps its state by parameter, as torch.optim's do.
        flatten: whether :meth:`state_dict` gives flat keys.

    Attributes:
        param_groups: those of all optimizers, one after the other: the very dicts, so that a change of ``lr`` arrives. Settable
            to a list of as many groups.
        state: parameter -> state of the optimizer that has it.
        defaults: those of the first optimizer; empty for an empty chain.
        optimizers_dict: name -> optimizer.
        optimizer: the one optimizer; ValueError unless there is exactly one.
        routing: which parameter went where and why, if :func:`hp_optim.get_hyper_optimizer` has made the chain; else None.

    Iterating gives the optimizers. Communication: that of the optimizers' steps.
    TypeError for a model or optimizers that are none; KeyError for a parameter that two of them have; ValueError for one that
    is not in the model.
    """

    model: Any
    flatten: bool
    routing: Routing | None
    optimizers_dict: dict[str, Any]
    _parameters: dict[str, Any]
    """Of the model, by all of their names, when they were last looked up."""

    def __init__(self, model: Any, optimizers: Mapping[str, Any], flatten: bool = False) -> None:
        platform = get_platform()
        if not platform.is_module(model):
            raise TypeError(
                f"ChainedOptimizer: model is a {type(model).__name__}; it is the module whose parameters the optimizers have: give it first"
            )
        if not isinstance(optimizers, Mapping):
            raise TypeError(
                f"ChainedOptimizer: optimizers is a {type(optimizers).__name__}; it is a dict from names to optimizers, such as "
                "{'adamw': AdamW(...), 'muon': Muon(...)}: give every optimizer a name"
            )
        if not isinstance(flatten, bool):
            raise TypeError(f"ChainedOptimizer: flatten is True or False, got {flatten!r}")
        for name, optimizer in optimizers.items():
            _check_optimizer(name, optimizer)
        self.__setstate__(
            {
                "model": model,
                "flatten": flatten,
                "routing": None,
                "optimizers_dict": dict(optimizers),
                "_parameters": parameters_by_name(platform, model),
            }
        )
        self._named()

    # --- what it is made of
    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers_dict.values())

    def __len__(self) -> int:
        return len(self.optimizers_dict)

    @property
    def optimizer(self) -> Any:
        """The only optimizer."""
        if len(self) != 1:
            raise ValueError(
                f"a chain has .optimizer if it has exactly one, this one has {len(self)} ({', '.join(self.optimizers_dict) or 'none'}): "
                "take one from optimizers_dict, or go over the chain"
            )
        return next(iter(self))

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Of the first optimizer."""
        return next((optimizer.defaults for optimizer in self), {})

    @property
    def state(self) -> ChainState:
        """Of all optimizers."""
        return ChainState(tuple(self))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all optimizers. A new list of the optimizers' own dicts."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not isinstance(groups, list):
            raise TypeError(f"param_groups of a chain is a list of dicts, got a {type(groups).__name__}")
        sizes = {name: len(optimizer.param_groups) for name, optimizer in self.optimizers_dict.items()}
        if len(groups) != sum(sizes.values()):
            raise ValueError(
                f"param_groups has {len(groups)} groups; the optimizers of the chain have {sum(sizes.values())} "
                f"({', '.join(f'{name} {size}' for name, size in sizes.items())}): give as many, in this order"
            )
        first = 0
        for optimizer, size in zip(self, sizes.values(), strict=True):
            part = groups[first : first + size]
            if hasattr(optimizer, "__setstate__") and not isinstance(optimizer, OptimizerChain):
                # What the optimizer worked out from its groups is worked out anew then.
                optimizer.__setstate__({"param_groups": part})
            else:
                optimizer.param_groups = part
            first = first + size

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Further parameters for the only optimizer. ValueError if there are several: give them to one of ``optimizers_dict``."""
        if len(self) != 1:
            raise ValueError(
                f"a chain of {len(self)} optimizers does not know which one shall have the new parameters: call add_param_group of one of "
                f"optimizers_dict ({', '.join(self.optimizers_dict) or 'which is empty'})"
            )
        self.optimizer.add_param_group(param_group)

    # --- training
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every optimizer, in order. Returns what ``closure`` returns, which is called once, first, with recording on.

        ValueError on all ranks, before any optimizer steps, for parameters (also of the framework's optimizers) that ``AdamW.step`` refuses.
        """
        loss = None
        if closure is not None:
            with self.platform.enable_grad():
                loss = closure()
        check_current("ChainedOptimizer", self.param_groups, gradient_of, self._parameters)
        for optimizer in self:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters; with ``set_to_none=False`` fill them with zeros."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none=set_to_none)

    # --- state
    def state_dict(self) -> dict[str, Any]:
        """State of all optimizers under the names of parameters; reading changes nothing, and nothing is copied.

        ``{"state": {name: {key: value}}, "param_groups": [{"params": [names], "lr": ..., ...}]}``; with ``flatten`` one dict
        with keys ``state.<name>.<key>`` and ``param_groups.<name>.<hyperparameter>``. State of sharded parameters comes as
        DTensors over the optimizers' own memory. A parameter that never had a gradient has no state. Hyperparameters that are
        functions are left out; those of the optimizer stay when it is loaded. Communication: none.

        KeyError for a parameter that two optimizers have; ValueError for one that is not in the model.
        """
        nested = read_optimizer(self.platform, self._named(), StateDictOptions())
        return flat_names.flattened(nested) if self.flatten else nested

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` made, flat or not, at any number of ranks; everything is checked before anything is written.

        Values are DTensors in any placements, whole tensors on any device, or tensors of the piece's shape; they are copied, cast
        to the dtype of state that is there already. A parameter without an entry has no state afterwards. The groups' count of
        steps becomes the same in all groups.

        RuntimeError with both lists for names that are missing or unexpected; ValueError for another shape, for groups that do
        not match, and for different counts of steps (of groups that have stepped). Communication: none for whole tensors, pieces
        and DTensors that lie as the parameters; for others what their redistribution needs.
        """
        named = self._named()
        nested = dict(self._nested(state_dict, named))
        groups = nested.get(flat_names.GROUPS, ())
        counts = _counts_of(groups)
        if len(counts) > 1:
            raise ValueError(
                f"the groups of the state dict have made different numbers of steps: {sorted(counts)}; optimizers of a chain step "
                "together: load them one by one, each into a chain of its own"
            )
        load_optimizer(self.platform, named, nested, StateDictOptions(), what="load_state_dict")
        for group in self.param_groups:
            if STEP in group and counts:
                group[STEP] = next(iter(counts))

    def like(self, name: str, shape: tuple[int, ...]) -> Any:
        """For ``hp_dtensor.load(path, like=chain.like)``: every rank reads only the pieces of its own shards.

        The parameter whose name is a part of ``name``, such as ``optimizer/state/layers.0.weight/exp_avg``, if it is a DTensor of
        this shape; else None, a whole tensor on the cpu. Communication: none.
        """
        return like_named(self.platform, self._parameters)(name, shape)

    def _nested(self, state_dict: Mapping[str, Any], named: NamedOptimizer) -> Mapping[str, Any]:
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"the state dict of a chain is a dict, got a {type(state_dict).__name__}: give what state_dict() made"
            )
        if not flat_names.is_flat(state_dict):
            return state_dict
        groups = [[named.name_of(p) for p in group[PARAMS]] for _, group in named.groups]
        return flat_names.unflattened(self.platform, state_dict, groups)

    def _named(self) -> NamedOptimizer:
        self._check_apart()
        if not {id(p) for group in self.param_groups for p in group[PARAMS]} <= set(
            map(id, self._parameters.values())
        ):
            # The model has got further parameters since. Else not: inside of a unit that is gathered they do not show.
            self._parameters = parameters_by_name(self.platform, self.model)
        return NamedOptimizer(self.platform, self._parameters, type(self.model).__name__, list(self))

    def _check_apart(self) -> None:
        """KeyError if a parameter is in two optimizers: it would be updated twice in a step, and have two states of one name."""
        owners: dict[int, str] = {}
        names = {id(parameter): name for name, parameter in reversed(self._parameters.items())}
        for own, optimizer in self.optimizers_dict.items():
            for parameter in (p for group in optimizer.param_groups for p in group[PARAMS]):
                other = owners.setdefault(id(parameter), own)
                if other != own:
                    name = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                    raise KeyError(
                        f"{name} is in two optimizers of the chain, {other} and {own}: leave it in one of them"
                    )

    # --- the framework's class
    def __getstate__(self) -> dict[str, Any]:
        return {
            key: self.__dict__[key]
            for key in ("model", "flatten", "routing", "optimizers_dict", "_parameters")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.platform = get_platform()
        # While there are no optimizers yet: the framework's class makes its tables of hooks, and looks at defaults.
        self.optimizers_dict = {}
        super().__setstate__({})
        self.__dict__.update(state)

    def __repr__(self) -> str:
        inner = "".join(f"\n{name}: {optimizer!r}" for name, optimizer in self.optimizers_dict.items())
        return f"ChainedOptimizer of {type(self.model).__name__}{inner or ', empty'}"

    def _no_hook(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "a chain makes its state dict by names, and calls no hooks for it: change what state_dict() returns, or what is given to "
            "load_state_dict()"
        )

    register_state_dict_pre_hook = _no_hook
    register_state_dict_post_hook = _no_hook
    register_load_state_dict_pre_hook = _no_hook
    register_load_state_dict_post_hook = _no_hook


def _check_optimizer(name: Any, optimizer: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"ChainedOptimizer: the names of optimizers are strings, got {name!r}")
    lacking = [
        part for part in ("param_groups", "state", "step", "zero_grad") if not hasattr(optimizer, part)
    ]
    if lacking:
        raise TypeError(
            f"ChainedOptimizer: optimizers[{name!r}] is a {type(optimizer).__name__}, which has no {', '.join(lacking)}: give an optimizer "
            "object, such as hp_optim.AdamW(...)"
        )


def _counts_of(groups: Any) -> set[int]:
    """The different numbers of steps that groups have made; those that made none are left out."""
    return {int(group[STEP]) for group in groups if group.get(STEP)}


if TYPE_CHECKING:
    ChainedOptimizer = OptimizerChain
else:
    ChainedOptimizer = make_optimizer_class("ChainedOptimizer", OptimizerChain)
"""The class of the framework in use."""
