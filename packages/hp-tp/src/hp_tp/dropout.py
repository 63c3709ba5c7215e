"""``DropoutParallel``: dropout of plain pieces with the mask of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import ParallelStyle, Placement, Replicate
from hp_dtensor.creation import check_mesh
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.placements import Shard
from hp_platform import get_platform
from hp_tp.styles.collectives import Collectives, of_sizes

Module = Any


class DropoutParallel(ParallelStyle):
    """Let a dropout layer draw the mask of one process, also where it gets plain tensors: pieces, or the same on all ranks.

    [Note: masks] The framework's own dropout draws from the generator of each process. Seeded alike, ranks give their pieces of one
    activation the *same* mask; seeded otherwise, they give their copies of one activation *different* ones. Neither is an
    error that anybody sees. With this style a mask depends on the seed (``hp_dtensor.manual_seed``, the same on all ranks),
    the number of the operation and the index of the element in the whole tensor: it is that of one process, in which
    dropout runs inside of ``hp_dtensor.random.global_draws()``. Where nothing is needed:

    - behind a style with ``use_local_output=False``: dropout of DTensors, layers and functions alike, draws like this anyway, also
      that of the probabilities in ``F.scaled_dot_product_attention``;
    - a layer in a cut sequence may take :class:`hp_tp.SequenceParallel`, which runs it on DTensors.

    A function (``F.dropout``) in a forward on plain pieces cannot be caught: let the style before it hand out DTensors.

    Args:
        input_layouts: how a plain input lies; default Replicate(). A DTensor knows it itself. On a mesh of several dims one
            placement per dim.
        sizes: dim that is cut -> its size in the whole tensor, such as ``{-1: 4096}``. Without it the ranks tell each other
            their sizes at every call, since pieces may be uneven, and the host waits for them.
        use_local_output: whether the result is handed out as a plain piece (default) or as a DTensor.

    The layer: any module without parameters (Dropout, Dropout2d, AlphaDropout ...); its ``p`` and mode are read at each call. A
    mesh of any number of dims, so it follows :class:`hp_tp.Linear2DParallel`, too. The result lies as the input does; of an
    input that is a sum it is whole.

    Communication per call: none if ``sizes`` names all dims that are cut, or none is; else one all-gather of ``ndim``
    integers per mesh dim that cuts. Backward: none (the mask is drawn again, or kept at two bits an element).

    ValueError when applied for a module with parameters, another number of placements than mesh dims, and ``sizes`` of dims that
    are not cut; in calls for what is no tensor, and pieces that are not those of a tensor of these sizes.
    """

    num_mesh_dims = None

    def __init__(
        self,
        *,
        input_layouts: Placement | Sequence[Placement] | None = None,
        sizes: Mapping[int, int] | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = _placements(input_layouts)
        self.sizes = _checked_sizes({} if sizes is None else sizes, self.input_layouts)
        if not isinstance(use_local_output, bool):
            raise ValueError(
                f"DropoutParallel: use_local_output must be True or False, got {use_local_output!r}"
            )
        self.use_local_output = use_local_output

    def check(self, module: Module, device_mesh: Any) -> None:
        """Raise what :meth:`apply` would raise, and change nothing."""
        check_mesh(device_mesh)
        platform, name = get_platform(), type(module).__name__
        if not platform.is_module(module):
            raise ValueError(f"DropoutParallel takes a dropout layer, got {name}")
        own = [n for n, _ in platform.named_parameters(module)]
        if own:
            raise ValueError(
                f"DropoutParallel takes a layer without parameters, {name} has {', '.join(own[:3])}: name the dropout in it in "
                f"the plan"
            )
        layouts = self._layouts(device_mesh)
        if len(layouts) != device_mesh.ndim:
            raise ValueError(
                f"DropoutParallel: input_layouts has {len(layouts)} placements, {device_mesh} has {device_mesh.ndim} dims: give "
                f"one per mesh dim"
            )

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Let the module run on the whole tensor's indices. No communication."""
        self.check(module, device_mesh)
        forward = OfWhole(
            device_mesh,
            self._layouts(device_mesh),
            self.sizes,
            self.use_local_output,
            type(module).__name__,
        )
        get_platform().override_forward(module, forward)
        return module

    def _layouts(self, mesh: Any) -> tuple[Placement, ...]:
        return (Replicate(),) * mesh.ndim if self.input_layouts is None else self.input_layouts


@dataclass(frozen=True)
class OfWhole:
    """The forward of a layer that sees its input as a piece of the whole."""

    mesh: Any
    layouts: tuple[Placement, ...]
    sizes: tuple[tuple[int, int], ...]
    use_local: bool
    name: str

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from hp_dtensor.native import DTensor

        given = (*args, *kwargs.values())
        if len(given) != 1 or not get_platform().is_tensor(given[0]):
            raise ValueError(
                f"DropoutParallel of {self.name} takes one tensor, got {', '.join(type(x).__name__ for x in given) or 'none'}"
            )
        (x,) = given
        if not is_dtensor(x):
            try:
                x = DTensor.from_local(x, self.mesh, self.layouts, shape=self._shape(tuple(x.shape)))
            except ValueError as error:
                raise ValueError(f"DropoutParallel of {self.name}: {error}") from error
        y = own(x)
        return y.to_local() if self.use_local else y

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        told = {dim for dim, _ in self.sizes}
        asked = [p for p in self.layouts if isinstance(p, Shard) and p.dim not in told]
        return of_sizes(asked[0], True) if asked and math.prod(self.mesh.shape) > 1 else Collectives()

    def _shape(self, piece: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the whole tensor, as far as it is known without asking."""
        ndim = len(piece)
        known = {dim % ndim: size for dim, size in self.sizes} if ndim else {}
        cut = {p.dim % ndim for p in self.layouts if isinstance(p, Shard)} if ndim else set()
        if not cut <= set(known):
            return None
        return tuple(known.get(dim, size) for dim, size in enumerate(piece))


def _placements(given: Any) -> tuple[Placement, ...] | None:
    if given is None:
        return None
    layouts = (given,) if isinstance(given, Placement) else given
    if isinstance(layouts, (list, tuple)) and layouts and all(isinstance(p, Placement) for p in layouts):
        return tuple(layouts)
    raise ValueError(
        f"DropoutParallel: input_layouts must be a placement such as Shard(-1), or one per mesh dim, got {given!r}"
    )


def _checked_sizes(sizes: Any, layouts: tuple[Placement, ...] | None) -> tuple[tuple[int, int], ...]:
    if not isinstance(sizes, Mapping) or not all(
        isinstance(x, int) and not isinstance(x, bool) for pair in sizes.items() for x in pair
    ):
        raise ValueError(
            f"DropoutParallel: sizes maps dims that are cut to their whole sizes, such as {{-1: 4096}}, got {sizes!r}"
        )
    cut = sorted({p.dim for p in layouts or () if isinstance(p, Shard)})
    for dim in sizes:
        if dim not in cut:
            raise ValueError(
                f"DropoutParallel: sizes names dim {dim}, but input_layouts cuts {', '.join(map(str, cut)) or 'none'}: name dims as "
                f"input_layouts does"
            )
    return tuple(sizes.items())
