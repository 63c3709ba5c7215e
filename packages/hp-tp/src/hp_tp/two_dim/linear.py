"""The style that lays a linear layer out over two mesh dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import ParallelStyle, Placement, Replicate, Shard, distribute_tensor
from hp_dtensor.creation import check_mesh
from hp_dtensor.module_tensors import is_dtensor, parameter_places, put_parameter
from hp_platform import get_platform
from hp_tp.two_dim.door import Door
from hp_tp.two_dim.panels import panels_of


class Linear2DParallel(ParallelStyle):
    """A linear layer over a mesh of two dims ``(tp_r, tp_c)``, whose weight and activations are cut over both.

    With r x c ranks, M rows (all dims of the input but the last), K = in_features and N = out_features, a rank holds
    M K / (r c) of the input, M N / (r c) of the output and K N / (r c) of the weight, and at no time a whole row of one of
    them, if both mesh dims have several ranks. Any r x c, also 1 x n and n x 1; all sizes, also uneven ones, by the rule of
    chunks. The output lies as the input does, so layers follow each other without communication in between::

        style = Linear2DParallel()
        parallelize_module(mlp, mesh["tp_r", "tp_c"], {"up": style, "down": style})

    Args:
        row_dim: the dim of input and output that is cut over tp_r (default: 0, the batch); any but the last one, which is cut
            over tp_c.
        input_layouts: how a plain input lies when it comes, one placement per mesh dim. Default: cut as the product wants
            it, ``(Shard(row_dim), Shard(-1))``. A DTensor knows it itself, and is redistributed if need be.
        output_layouts: how the output shall lie. Default: ``(Shard(row_dim), Shard(-1))``.
        num_panels: into how many panels the moving dim is cut (default: ``max(r, c)``); fewer are quicker where there is
            memory, 1 gathers whole rows.
        use_local_output: whether local tensors are handed out (default), or DTensors.

    The weight ``(N, K)`` becomes ``(Shard(1), Shard(0))`` if K <= N, else ``(Shard(0), Shard(1))``; the bias ``(N,)``
    ``(Replicate(), Shard(0))``. It is added once, behind the product.

    [Note: what stays] The larger of input and output stays where it is. If K <= N the input moves over tp_c by all-gathers,
    and the weight over tp_r. If K > N the weight moves over tp_r, and the output over tp_c by reduce-scatters.

    Communication per rank and call, in elements, with P = min(K, N), Q = max(K, N), this rank's m rows (about M / r) and q
    columns of Q (about Q / c): collectives over ``m P`` elements along tp_c and over ``P q`` along tp_r, of which (c - 1) / c
    and (r - 1) / r are received; nothing along a mesh dim of one rank. Backward: twice that (once if the input wants no
    gradient), and an all-reduce of the bias's gradient along tp_r, n elements, its columns on this rank. Launches: one per
    panel and moving operand, num_panels along each mesh dim in forward and four times num_panels in backward together.
    Redistribution to and from other layouts comes on top. For comparison: column-wise and row-wise layers over p ranks move
    2 M N (p - 1) / p in forward for a pair of them, whatever p is; here what moves falls with r and c. Panels are
    all-gathered, not broadcast as in SUMMA: see [Note: slices] in :mod:`hp_tp.two_dim.panels`. Autocast casts operands before they
    travel.

    Memory beside the blocks: two panels of each moving operand, ``2 P (m + q) / num_panels`` elements, and in backward as much
    for products that are being scattered. Nothing that was gathered is kept for backward. Where 16-bit floats are added up
    over panels, it is in float32, ``m q`` elements.

    Derivatives of every order. Initialisation (``init_parameters``) equals that of one process. Another forward stands in the
    place of the layer's; hooks, names and state stay.

    Raises: ValueError when applied for what is no linear layer (``Linear``, on MindSpore also ``Dense``), one with a forward of
    its own, parameters that are DTensors already, a mesh of another number of dims, and arguments that do not fit; in calls
    for inputs of another dtype, mesh or number of columns.

    Source: van de Geijn and Watts, 1997, "SUMMA: scalable universal matrix multiplication algorithm"; Xu et al., 2021, "An
    efficient 2D method for training super-large deep learning models", arXiv:2104.05343; Nam et al., ISCA 2025, "MeshSlice".
    """

    num_mesh_dims = 2

    def __init__(
        self,
        *,
        row_dim: int = 0,
        input_layouts: Sequence[Placement] | None = None,
        output_layouts: Sequence[Placement] | None = None,
        num_panels: int | None = None,
        use_local_output: bool = True,
    ) -> None:
        if isinstance(row_dim, bool) or not isinstance(row_dim, int) or row_dim == -1:
            raise ValueError(
                f"row_dim is the dim of the activations that is cut over the first mesh dim, any but the last, got {row_dim!r}"
            )
        if num_panels is not None and (
            isinstance(num_panels, bool) or not isinstance(num_panels, int) or num_panels < 1
        ):
            raise ValueError(f"num_panels is a number of panels, 1 or more, or None, got {num_panels!r}")
        self.row_dim = row_dim
        self.input_layouts = _two_placements(input_layouts, "input_layouts")
        self.output_layouts = _two_placements(output_layouts, "output_layouts")
        self.num_panels = num_panels
        self.use_local_output = use_local_output

    def check(self, module: Any, device_mesh: Any) -> None:
        """Raise what :meth:`apply` would raise, and change nothing."""
        check_mesh(device_mesh)
        if device_mesh.ndim != self.num_mesh_dims:
            raise ValueError(
                f"Linear2DParallel takes a mesh of 2 dims, got {device_mesh}; slice it by name, such as mesh['tp_r', 'tp_c'], or "
                f"make it of shape (r, c)"
            )
        self._checked(module)

    def lays_out(self, module: Any) -> list[Any]:
        """The modules whose parameters become DTensors."""
        return [module]

    def apply(self, module: Any, device_mesh: Any) -> Any:
        """Cut the layer's parameters and exchange its forward; returns the layer. All ranks of the mesh call."""
        self.check(module, device_mesh)
        places = {place.attribute: place for place in self._checked(module)}
        out_features, in_features = places["weight"].tensor.shape
        smaller = min(in_features, out_features)
        door = Door(
            name=f"{type(module).__name__}({in_features}, {out_features})",
            mesh=device_mesh,
            in_features=in_features,
            out_features=out_features,
            row_dim=self.row_dim,
            input_layouts=self.input_layouts,
            output_layouts=self.output_layouts,
            use_local_output=self.use_local_output,
            num_panels=min(self.num_panels or max(device_mesh.shape), max(1, smaller)),
            has_bias="bias" in places,
        )
        panels_of(device_mesh, smaller, door.num_panels)  # makes the groups here, where all ranks are
        for name, place in places.items():
            wanted = door.weight_placements() if name == "weight" else (Replicate(), Shard(0))
            cut = distribute_tensor(place.tensor, device_mesh, wanted, src_data_rank=self.src_data_rank)
            put_parameter([place], cut)
        get_platform().override_forward(module, door)
        return module

    @staticmethod
    def _checked(module: Any) -> list[Any]:
        """The places of weight and bias. ValueError unless it is a linear layer with plain parameters."""
        platform, name = get_platform(), type(module).__name__
        if not platform.is_module(module) or platform.layer_kind(module) != "linear":
            raise ValueError(
                f"Linear2DParallel takes a linear layer, got {name}: name the linear layers in it in the plan"
            )
        places = [place for place in parameter_places(module) if place.owner is module]
        for place in places:
            if is_dtensor(place.tensor):
                raise ValueError(
                    f"Linear2DParallel: {place.attribute} of {name} is a DTensor already, {place.tensor._spec}: give a layer "
                    f"one style"
                )
        if not platform.has_stock_forward(module):
            raise ValueError(
                f"Linear2DParallel puts a product of its own in the place of the framework's, but {name} has a forward of its "
                f"own: let it hold a linear layer, and name that in the plan"
            )
        names = sorted(place.attribute for place in places)
        if names not in (["weight"], ["bias", "weight"]):
            raise ValueError(
                f"Linear2DParallel takes a layer with weight and perhaps bias, {name} has {', '.join(names) or 'no parameters'}"
            )
        return places


def _two_placements(given: Sequence[Placement] | None, what: str) -> tuple[Placement, ...] | None:
    if given is None:
        return None
    if not (isinstance(given, Sequence) and len(given) == 2 and all(isinstance(p, Placement) for p in given)):
        raise ValueError(
            f"{what} takes one placement per mesh dim, such as (Replicate(), Replicate()), or None, got {given!r}"
        )
    return tuple(given)
