"""What all optimizers of this package share; the classes that users see are made of it in :mod:`hp_optim.make_class`.

An algorithm is a class that inherits from :class:`OptimizerSteps` and is written on the platform alone. It says what its
hyperparameters are, and how a step is done. :func:`hp_optim.make_class.make_optimizer_class` puts it on the framework's own
ground: on torch a true ``torch.optim.Optimizer``, on MindSpore a plain class of the same surface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hp_optim.checks import NAMES, PARAMS, check_current, check_keys, check_unknown
from hp_optim.groups import Group, group_of, groups_of
from hp_optim.offload.home import OFFLOAD_STATE, StateHome, StateMemory
from hp_optim.offload.transfers import transfers_of
from hp_optim.pieces import like, local_of
from hp_platform.platform import get_platform
from hp_platform.protocols.tensor import Tensor

MAIN_GRAD = "main_grad"
"""Attribute of a parameter that holds its gradient in a wider dtype than the parameter's; it goes before ``grad``."""
STEP = "step"
"""Key of a group: how many steps it has made."""
HOW_IT_RUNS = (OFFLOAD_STATE, "fused")
"""Keys of a group that say where and by what it is updated: they stay when a state dict is loaded."""


def gradient_of(parameter: Any) -> Any:
    """``parameter.main_grad`` if it has one, else ``parameter.grad``; None if neither is there. A DTensor's is a DTensor."""
    found = getattr(parameter, MAIN_GRAD, None)
    if found is not None:
        return found
    return _grad_of(parameter)


def _grad_of(parameter: Any) -> Any:
    # Of a plain tensor through the platform: on MindSpore it is the same object each time then.
    return parameter.grad if hasattr(parameter, "to_local") else get_platform().get_grad(parameter)


def own_gradient(optimizer: str, parameter: Any, gradient: Any) -> Tensor:
    """This rank's piece of a gradient, placed as the parameter: a ``main_grad`` that is a sum over ranks, or lies otherwise, is
    redistributed, on all ranks alike. ValueError for a piece of another shape.
    """
    spec = getattr(parameter, "_spec", None)
    if spec is not None and getattr(gradient, "_spec", spec) is not spec:
        gradient = gradient.redistribute(spec.mesh, spec.placements)
    own, local = local_of(gradient), local_of(parameter)
    if tuple(own.shape) != tuple(local.shape):
        raise ValueError(
            f"{optimizer}: the gradient of a parameter of shape {tuple(parameter.shape)} has shape {tuple(own.shape)} on this rank, "
            f"which holds {tuple(local.shape)} of it: give this rank's shard, or a DTensor"
        )
    return own


if TYPE_CHECKING:

    class _Ground:
        """What an algorithm stands on: ``torch.optim.Optimizer``, or the class that takes its place on MindSpore."""

        defaults: dict[str, Any]
        param_groups: list[Group]

        def __init__(self, params: Any, defaults: dict[str, Any]) -> None: ...
        def add_param_group(self, param_group: Group) -> None: ...
        def state_dict(self) -> dict[str, Any]: ...
        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...
        def zero_grad(self, set_to_none: bool = True) -> None: ...
        def __setstate__(self, state: dict[str, Any]) -> None: ...

else:
    _Ground = object


class OptimizerSteps(_Ground):
    """An algorithm: what happens in a step. To inherit from; users get the classes made by ``make_optimizer_class``.

    An algorithm defines :meth:`_update`, :meth:`_check_group` and, if it keeps plans or caches, :meth:`_forget_plans`; its
    ``__init__`` calls this one's with all hyperparameters as ``defaults``. Attributes other than ``defaults``, ``state`` and
    ``param_groups`` are not pickled and not copied: what is not in a plan belongs into one of these.
    """

    HYPERPARAMETERS: ClassVar[frozenset[str]] = frozenset()
    """Names of all arguments of the constructor but ``params``."""
    MAKE_TRANSFERS = staticmethod(transfers_of)
    """How state on the host gets to a device; a subclass may have others (:mod:`hp_optim.offload.late`)."""

    def __init__(self, params: Any, defaults: dict[str, Any], unknown: Mapping[str, Any]) -> None:
        """``unknown``: the keyword arguments that the algorithm does not have; ValueError if there are any."""
        self.platform = get_platform()
        name = type(self).__name__
        check_unknown(name, unknown, self.HYPERPARAMETERS)
        self._check_group(defaults)
        groups = groups_of(self.platform, name, params)
        self._memory = StateMemory(self.platform, self.MAKE_TRANSFERS)
        self._forget_plans()
        super().__init__(groups, {**defaults, STEP: 0})

    # --- what an algorithm gives
    def _update(self) -> None:
        """One step: parameters and ``state`` from gradients. Runs without recording."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it makes a step: define _update")

    def _check_group(self, group: Group) -> None:
        """ValueError for hyperparameters, and (if ``"params"`` is there) parameters, that the algorithm does not take."""

    def _forget_plans(self) -> None:
        """Groups or state are others now: what was worked out from them is worked out anew at the next step."""

    # --- state
    @property
    def state(self) -> Any:
        """Parameter -> its state, a dict; parameters that never had a gradient have none.

        With ``offload_state`` the host waits here for state that is on its way from the device; what was read before a step
        is read anew after it.
        """
        self._memory.land()
        return self._entries

    @state.setter
    def state(self, value: Any) -> None:
        self._memory.land()
        self.__dict__["state"] = value

    @property
    def _entries(self) -> Any:
        """The same, for who looks at no values of tensors."""
        return self.__dict__["state"]

    def _home_of(self, group: Group) -> StateHome:
        return StateHome(self.platform, self._memory, offloads=bool(group.get(OFFLOAD_STATE)))

    def _check_offload(self, group: Group) -> None:
        if not isinstance(group[OFFLOAD_STATE], bool):
            raise ValueError(
                f"{type(self).__name__}: {OFFLOAD_STATE} is {group[OFFLOAD_STATE]!r}; it must be True or False"
            )

    # --- what users call
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what ``closure`` returns, which is called first, with recording on.

        ValueError on all ranks, and nothing has changed, if others have taken the place of a parameter in the model since the optimizer
        was made: by ``fully_shard``, or, where it has no gradient either, by ``parallelize_module``, ``shard_module`` or
        ``distribute_module``.
        """
        loss = None
        if closure is not None:
            with self.platform.enable_grad():
                loss = closure()
        check_current(type(self).__name__, self.param_groups, gradient_of)
        with self.platform.no_grad():
            self._update()
        return loss

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Further parameters, with hyperparameters of their own where the dict has some. Their group counts the steps of the others.

        ValueError for parameters that the optimizer has already, or must not have; nothing has changed then.
        """
        name, platform = type(self).__name__, self.platform
        group = group_of(platform, name, param_group)
        check_keys(name, group, self.HYPERPARAMETERS)
        present = {id(p) for other in self.param_groups for p in other[PARAMS]}
        twice = [place for place, p in enumerate(group[PARAMS]) if id(p) in present]
        if twice:
            raise ValueError(
                f"{name}: parameter {twice[0]} of the new group, of shape {tuple(group[PARAMS][twice[0]].shape)}, is in another group "
                "already: leave it in one of them"
            )
        if any((NAMES in other) != (NAMES in group) for other in self.param_groups):
            raise ValueError(
                f"{name}: some groups have names of parameters and some have not: give all as (name, parameter) pairs, or none"
            )
        # One count for all groups, so that a state dict of them can be taken: what a parameter has missed is kept in its state.
        group.setdefault(STEP, max((other.get(STEP, 0) for other in self.param_groups), default=0))
        for key, value in self.defaults.items():
            group.setdefault(key, value)
        self._check_group(group)
        self._memory.land()
        super().add_param_group(group)
        self._forget_plans()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, ``main_grad`` too; with ``set_to_none=False`` fill them with zeros."""
        platform = self.platform
        for group in self.param_groups:
            for parameter in group[PARAMS]:
                wide = getattr(parameter, MAIN_GRAD, None)
                if set_to_none:
                    if wide is not None:
                        setattr(parameter, MAIN_GRAD, None)
                    if hasattr(parameter, "to_local"):
                        parameter.grad = None
                    else:
                        platform.set_grad(parameter, None)
                    continue
                for found in (wide, _grad_of(parameter)):
                    if found is not None:
                        platform.fill_(local_of(found), 0.0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take groups and state of a dict that :meth:`state_dict` made, of this class or of torch's; values are copied.

        ``offload_state`` and ``fused`` stay as they are: they say how this optimizer runs.
        """
        groups = list(state_dict["param_groups"])
        for number, (given, own) in enumerate(zip(groups, self.param_groups, strict=False)):
            groups[number] = {**given, **{key: own[key] for key in HOW_IT_RUNS if key in own}}
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.platform = get_platform()
        if "_memory" not in self.__dict__:
            self._memory = StateMemory(self.platform, self.MAKE_TRANSFERS)
        self._memory.land()
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():  # of a dict that another version or optimizer has made
                group.setdefault(key, value)
        self._forget_plans()

    def _loaded(self, group: Group, parameter: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
        """State of one parameter from a state dict: copies where its state lies, in their own dtypes."""
        platform, home = self.platform, self._home_of(group)
        device = platform.device_of(local_of(parameter))

        def own(value: Any) -> Any:
            if not platform.is_tensor(value):
                return value
            local = platform.detach(local_of(value))
            is_of_elements = tuple(value.shape) == tuple(parameter.shape)
            return like(value, home.copied(local, device) if is_of_elements else platform.clone(local))

        return {key: own(value) for key, value in entry.items()}


def all_parameters(groups: Iterable[Group]) -> list[Any]:
    """Of all groups, in their order."""
    return [parameter for group in groups for parameter in group[PARAMS]]
