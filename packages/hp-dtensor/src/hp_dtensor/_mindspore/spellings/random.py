"""What draws numbers, and new tensors like another one. The rules draw by themselves: values are those of ``hp_dtensor.random``."""

from __future__ import annotations

from typing import Any

from hp_dtensor._mindspore.dtypes import dtype_of
from hp_dtensor._mindspore.samples import multinomial
from hp_dtensor._mindspore.spelling import Operation, spelling
from hp_dtensor.dtensor import DTensorMethods


def _share_dropped(keep_prob: float) -> float:
    """The user's p, of which MindSpore has made ``1 - p``."""
    return round(1 - keep_prob, 15)


@spelling("dropout", "Dropout")
def _dropout_of_object(operation: Operation, x: Any, keep_prob: float, *seeds: int) -> Any:
    return operation.follow("dropout", operation.native, x, _share_dropped(keep_prob), True), None


@spelling("dropout", "FuncDropoutExt", "DropoutExt")
def _dropout(
    operation: Operation, x: Any, p: float, training: bool = True, inplace: bool = False, *generator: Any
) -> Any:
    _refuse_in_place(operation, inplace)
    return operation.follow("dropout", operation.native, x, p, training)


@spelling("feature_dropout", "Dropout2D", "Dropout3D")
def _channels_dropped_by_object(operation: Operation, x: Any) -> Any:
    p = _share_dropped(operation.attributes.keep_prob)
    return operation.follow("feature_dropout", operation.native, x, p, True), None


@spelling("feature_dropout", "Dropout2dExt", "Dropout3dExt")
def _channels_dropped(
    operation: Operation, x: Any, p: float, training: bool = True, inplace: bool = False, *generator: Any
) -> Any:
    _refuse_in_place(operation, inplace)
    return operation.follow("feature_dropout", operation.native, x, p, training)


def _refuse_in_place(operation: Operation, inplace: bool) -> None:
    if inplace:
        raise NotImplementedError(
            f"mindspore: {operation.name} in place of a DTensor: MindSpore's own writes nothing on cpu; use inplace=False"
        )


@spelling("bernoulli", "Bernoulli")
def _bernoulli(operation: Operation, x: Any, p: Any) -> Any:
    if isinstance(p, DTensorMethods):
        return operation.follow("bernoulli", operation.native, p)
    if p.size != 1:
        raise ValueError(
            "bernoulli of a DTensor takes one probability, or a DTensor with one for each element"
        )
    return operation.follow("bernoulli", operation.native, x, float(p.asnumpy().item()))


@spelling("bernoulli", "BernoulliExt")
def _bernoulli_of_each(operation: Operation, p: Any, *generator: Any) -> Any:
    return operation.follow("bernoulli", operation.native, p)


def _like(rule: str, num_values: int, generator: int, *primitives: str) -> None:
    """Primitives that take a tensor, ``num_values`` numbers, ``generator`` arguments of a generator and a dtype."""

    @spelling(rule, *primitives)
    def read(operation: Operation, x: Any, *args: Any) -> Any:
        values, rest = args[:num_values], args[num_values + generator :]
        dtype = dtype_of(rest[0]) if rest else None
        return operation.follow(
            rule, operation.native, x, *values, **({} if dtype is None else {"dtype": dtype})
        )


_like("rand_like", 0, 2, "RandLikeExt")
_like("randn_like", 0, 2, "RandnLike")
_like("randint_like", 2, 2, "RandIntLike")
_like("zeros_like", 0, 0, "ZerosLike", "ZerosLikeExt")
_like("ones_like", 0, 0, "OnesLike", "OnesLikeExt")
_like("empty_like", 0, 0, "EmptyLike")
_like("full_like", 1, 0, "FullLike")


@spelling("multinomial", "Multinomial")
def _multinomial_of_object(operation: Operation, x: Any, num_samples: int) -> Any:
    return multinomial(x, num_samples, True, operation.attributes.init_attrs["dtype"])


@spelling("multinomial", "MultinomialExt")
def _multinomial(
    operation: Operation, x: Any, num_samples: int, replacement: bool = False, *generator: Any
) -> Any:
    return multinomial(x, num_samples, replacement)


@spelling("typeof", "typeof")
def _typeof(operation: Operation, x: Any) -> Any:
    """What MindSpore's functions ask before they work: the kind of tensor, with its dtype."""
    return operation.native(x._local)
