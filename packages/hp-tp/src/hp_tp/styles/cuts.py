"""What a tensor parallel style cuts of a module: the protocol by which any module says it.

[Note: the protocol of cuts] Linear, Embedding and convolutions of the framework are known. Any other module says how it is cut
by a method of its own, or the style is told by ``cuts=``::

    class Gate(Module):                       # y = sigmoid(x @ weight.T) * scale
        def tensor_parallel_cuts(self, style):
            if style == "colwise":
                return ModuleCuts({"weight": 0, "scale": 0})
            raise ValueError("a Gate cannot be cut by rows: sigmoid is not linear")

It is promised that its forward, run with the pieces in the place of the parameters, gives this rank's piece of the features
(colwise), or a summand of the result (rowwise).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hp_platform import get_platform

Module = Any
METHOD = "tensor_parallel_cuts"


@dataclass(frozen=True)
class ModuleCuts:
    """How the parameters of one module are cut for one style.

    Args:
        parameters: name of each own parameter -> the tensor dim that is cut; None: it is whole on every rank.
        feature_dim: the dim of the result (colwise) or of the input (rowwise) that is cut along with the parameters, counted
            from the end.
        added_after: name of the parameter that forward adds to its result along ``feature_dim``, of shape ``(features,)``
            (rowwise only): it is left out of forward, which finds None in its place, and added once, after the reduction.
        input_is_cut: whether forward takes this rank's piece of the features, too (colwise only): activations and
            norms of each feature for itself.
        on_dtensors: whether forward runs on DTensors, parameters and input alike, instead of on pieces: any forward made of
            operations that DTensors know is right then, and its result may lie as it likes.
        features: how many features there are in all; default: the size of the first cut parameter along its dim.
    """

    parameters: Mapping[str, int | None]
    feature_dim: int = -1
    added_after: str | None = None
    input_is_cut: bool = False
    on_dtensors: bool = False
    features: int | None = None


def cuts_of(module: Module, style: str, given: Any, known: Mapping[str, Any]) -> ModuleCuts:
    """The cuts for ``style`` ("colwise" or "rowwise"): as given, as the module says, or as ``known`` for its kind of layer.

    ValueError for a module that is of no known kind and does not say, and for cuts that do not fit its parameters.
    """
    platform = get_platform()
    name = f"{style.capitalize()}Parallel"
    kind = platform.layer_kind(module)
    if given is None and callable(getattr(module, METHOD, None)):
        given = getattr(module, METHOD)(style)
    if given is None:
        make = known.get(kind or "")
        if make is None:
            raise ValueError(
                f"{name} does not know how to cut a {type(module).__name__}: it knows Linear, Embedding and convolutions. Say "
                f"cuts=ModuleCuts(...) in the style, or give the module a method {METHOD}(style)"
            )
        given = make(module)
    if not isinstance(given, ModuleCuts):
        raise TypeError(
            f"the cuts of a {type(module).__name__} must be a ModuleCuts, got {type(given).__name__}"
        )
    return _fitting(module, given, name)


def _fitting(module: Module, cuts: ModuleCuts, style: str) -> ModuleCuts:
    """The cuts with dims from 0 on, of just the parameters that there are."""
    platform = get_platform()
    own = dict(platform.named_parameters(module, recurse=False, remove_duplicate=False))
    kind = type(module).__name__
    computed = ", ".join(map(repr, getattr(module, "parametrizations", {})))
    if computed and any(name not in own for name in cuts.parameters):
        raise ValueError(
            f"{style}: {computed} of this {kind} is what a parametrization computes (weight_norm and its like), and a style cuts parameters: "
            f"remove the parametrization before (torch.nn.utils.parametrize.remove_parametrizations(module, {computed})), or leave the "
            "layer out of the plan"
        )
    if not own:
        raise ValueError(f"{style} cuts parameters, but this {kind} has none of its own")
    missing = [name for name in own if name not in cuts.parameters]
    unknown = [
        name for name in cuts.parameters if name not in own and getattr(module, name, _MISSING) is not None
    ]
    if missing or unknown:
        raise ValueError(
            f"{style}: the cuts of this {kind} must name its parameters {', '.join(own)}; "
            + (f"missing: {', '.join(missing)}" if missing else f"it has no {', '.join(unknown)}")
        )
    dims: dict[str, int | None] = {}
    for name, parameter in own.items():
        dim, ndim = cuts.parameters[name], len(parameter.shape)
        if dim is not None and not -ndim <= dim < ndim:
            raise ValueError(f"{style}: {name!r} of this {kind} has {ndim} dims, so dim {dim} cannot be cut")
        dims[name] = None if dim is None else dim % ndim
    if all(dim is None for dim in dims.values()):
        raise ValueError(f"{style}: the cuts of this {kind} cut no parameter")
    if cuts.feature_dim >= 0:
        raise ValueError(f"{style}: feature_dim is counted from the end, such as -1; got {cuts.feature_dim}")
    features = cuts.features
    if features is None:
        features = next(own[name].shape[dim] for name, dim in dims.items() if dim is not None)
    after = cuts.added_after if cuts.added_after in own else None
    return replace(cuts, parameters=dims, added_after=after, features=features)


_MISSING = object()


# ------------------------------------------------------------------------------------------------------------ known layers
def linear_by_columns(module: Module) -> ModuleCuts:
    """The rows of ``weight (out, in)``: the columns of ``x @ weight.T``."""
    return ModuleCuts({"weight": 0, "bias": 0})


def linear_by_rows(module: Module) -> ModuleCuts:
    """The columns of ``weight (out, in)``: the rows of ``weight.T``."""
    return ModuleCuts({"weight": 1, "bias": None}, added_after="bias")


def embedding_by_columns(module: Module) -> ModuleCuts:
    """The columns of ``weight (num, dim)``."""
    return ModuleCuts({"weight": 1}, on_dtensors=True)


def embedding_by_rows(module: Module) -> ModuleCuts:
    """The rows of ``weight (num, dim)``."""
    return ModuleCuts({"weight": 0}, on_dtensors=True)


def convolution_by_columns(module: Module) -> ModuleCuts:
    """The channels that come out."""
    _check_one_group(module, "Colwise")
    return ModuleCuts({"weight": 0, "bias": 0}, feature_dim=1 - len(module.weight.shape))


def convolution_by_rows(module: Module) -> ModuleCuts:
    """The channels that go in."""
    _check_one_group(module, "Rowwise")
    return ModuleCuts(
        {"weight": 1, "bias": None}, feature_dim=1 - len(module.weight.shape), added_after="bias"
    )


def _check_one_group(module: Module, style: str) -> None:
    if module.groups != 1:
        raise ValueError(
            f"{style}Parallel cuts the channels of convolutions with one group, this {type(module).__name__} has "
            f"{module.groups}: say cuts= if each rank may have whole groups"
        )


BY_COLUMNS: Mapping[str, Callable[[Module], ModuleCuts]] = {
    "linear": linear_by_columns,
    "embedding": embedding_by_columns,
    "convolution": convolution_by_columns,
}
"""How layers of the framework are cut by the features that they give, by their kind."""
BY_ROWS: Mapping[str, Callable[[Module], ModuleCuts]] = {
    "linear": linear_by_rows,
    "embedding": embedding_by_rows,
    "convolution": convolution_by_rows,
}
"""The same by the features that they take."""
