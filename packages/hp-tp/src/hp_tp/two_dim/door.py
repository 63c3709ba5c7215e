"""What a call of a linear layer over two mesh dims does: input to its place, product, bias, output from its place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hp_dtensor import Partial, Placement, Shard
from hp_dtensor.chunk import chunk_size
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.no_elements import zeros_from
from hp_platform import get_platform
from hp_tp.styles.collectives import Collectives
from hp_tp.two_dim.panels import COLUMNS, panels_of
from hp_tp.two_dim.products import collect, spread
from hp_tp.two_dim.traffic import traffic_of

Tensor = Any


@dataclass(frozen=True)
class Door:
    """What :class:`hp_tp.Linear2DParallel` has decided for one layer. An object and no closure, so that modules can be copied."""

    name: str
    """Of the layer's class, for messages."""
    mesh: Any
    in_features: int
    out_features: int
    row_dim: int
    input_layouts: tuple[Placement, ...] | None
    output_layouts: tuple[Placement, ...] | None
    use_local_output: bool
    num_panels: int
    has_bias: bool

    @property
    def moves_input(self) -> bool:
        """Whether the input moves and the output stays. [Note: what stays] in :mod:`hp_tp.two_dim.linear`."""
        return self.in_features <= self.out_features

    def weight_placements(self) -> tuple[Placement, Placement]:
        """Of the weight ``(out, in)``: what moves is cut over tp_r."""
        return (Shard(1), Shard(0)) if self.moves_input else (Shard(0), Shard(1))

    def __call__(self, module: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What runs in the place of the layer's forward: see ``platform.override_forward``."""
        given = (*args, *kwargs.values())
        if len(given) != 1:
            raise ValueError(f"{self.name} takes one tensor, got {len(given)} arguments")
        local, shape = self._taken(given[0])
        platform = get_platform()
        weight = _dtensor(module, "weight").to_local()
        dtype = platform.product_dtype(local)
        if local.dtype != weight.dtype and dtype == local.dtype:
            raise ValueError(
                f"the input of {self.name} is {platform.dtype_name(local.dtype)}, its weight "
                f"{platform.dtype_name(weight.dtype)}: cast one of them"
            )
        local, weight = platform.cast(local, dtype), platform.cast(weight, dtype)
        panels = panels_of(self.mesh, min(self.in_features, self.out_features), self.num_panels)
        rows = platform.reshape(local, (math.prod(local.shape[:-1]), local.shape[-1]))
        if self.moves_input:
            result = spread(rows, platform.transpose(weight, 0, 1), panels)
        else:
            result = collect(rows, weight, panels)
        result = platform.reshape(result, (*local.shape[:-1], result.shape[-1]))
        if self.has_bias:
            # Ranks along tp_r add it to different rows, so its gradient comes in summands.
            bias = _dtensor(module, "bias").to_local(grad_placements=(Partial(), Shard(0)))
            bias = platform.cast(bias, dtype)
            # See [Note: empty pieces] in hp_dtensor.no_elements.
            result = zeros_from(result, (result, bias)) if 0 in result.shape else result + bias
        return self._handed_out(result, local.ndim, shape)

    def collectives(self, module: Any) -> Collectives:
        """What a call sends, if the input lies as the product wants it."""
        weight = _dtensor(module, "weight")
        bias = _dtensor(module, "bias") if self.has_bias else None
        itemsize = get_platform().itemsize(weight.dtype)
        return traffic_of(weight, tuple(self.mesh.shape), self.moves_input, bias, itemsize)

    # --------------------------------------------------------------------------------------------------------------- doors
    def _taken(self, x: Any) -> tuple[Tensor, tuple[int, ...] | None]:
        """The piece of the input that the product takes, and the global shape of the input where it is known."""
        from hp_dtensor.native import DTensor

        if not is_dtensor(x) and not get_platform().is_tensor(x):
            raise ValueError(f"{self.name} takes a tensor, got {type(x).__name__}")
        cut = self._cut(x.ndim)
        if not is_dtensor(x):
            given = cut if self.input_layouts is None else self._fitting(self.input_layouts, x.ndim)
            if given == cut:
                self._check_columns(x.shape[-1])
                return x, None
            x = DTensor.from_local(x, self.mesh, given)
        elif x.device_mesh != self.mesh:
            raise ValueError(
                f"the input of {self.name} lies on {x.device_mesh}, but the style was applied on {self.mesh}"
            )
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"the input of {self.name} has the global shape {tuple(x.shape)}: its last dim must be in_features "
                f"{self.in_features}"
            )
        return x.redistribute(placements=cut).to_local(), tuple(x.shape)

    def _check_columns(self, given: int) -> None:
        num_ranks, index = self.mesh.shape[COLUMNS], self.mesh.get_coordinate()[COLUMNS]
        wanted = chunk_size(self.in_features, num_ranks, index)
        if given != wanted:
            raise ValueError(
                f"the input of {self.name} has {given} columns on this rank, but chunk {index} of in_features "
                f"{self.in_features} over {num_ranks} ranks has {wanted}: give the input's piece, or say in input_layouts how "
                f"it lies, such as (Replicate(), Replicate())"
            )

    def _handed_out(self, result: Tensor, ndim: int, shape: tuple[int, ...] | None) -> Any:
        from hp_dtensor.native import DTensor

        cut = self._cut(ndim)
        wanted = cut if self.output_layouts is None else self._fitting(self.output_layouts, ndim)
        if wanted == cut and self.use_local_output:
            return result
        whole = None if shape is None else (*shape[:-1], self.out_features)
        output = DTensor.from_local(result, self.mesh, cut, shape=whole).redistribute(placements=wanted)
        return output.to_local() if self.use_local_output else output

    def _cut(self, ndim: int) -> tuple[Placement, ...]:
        """How activations of so many dims are cut."""
        row_dim = self.row_dim + ndim if self.row_dim < 0 else self.row_dim
        if not 0 <= row_dim < ndim - 1:
            raise ValueError(
                f"{self.name} got a tensor of {ndim} dims, of which row_dim={self.row_dim} is to be cut over the first mesh dim: "
                f"give a tensor with that dim before the last one, which holds the features"
            )
        return Shard(row_dim), Shard(ndim - 1)

    @staticmethod
    def _fitting(layouts: tuple[Placement, ...], ndim: int) -> tuple[Placement, ...]:
        """Placements with dims counted from the front."""
        return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) and p.dim < 0 else p for p in layouts)


def _dtensor(module: Any, name: str) -> Any:
    """The layer's parameter as it is now."""
    return get_platform().get_parameter(module, name)
