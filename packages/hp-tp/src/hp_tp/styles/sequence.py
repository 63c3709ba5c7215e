"""``SequenceParallel``: every rank computes a part of the sequence, with all the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor, ParallelStyle, Placement, Replicate, Shard
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_tp.styles.collectives import Collectives, nbytes_of, of_move, of_parameters, of_sizes
from hp_tp.styles.cutting import check_flag, check_layout, check_line
from hp_tp.styles.door import Door, make_door
from hp_tp.styles.entrance import as_dtensor, first_argument
from hp_tp.styles.exits import check_even
from hp_tp.styles.placing import check_unplaced, local_of, place, run_with, summed_over

Module = Any
_OF_EACH_ROW = ("layer_norm", "rms_norm")
"""Layers whose last dims, those of their weight, are all that they look at together."""


class SequenceParallel(ParallelStyle):
    """Run a norm, dropout or anything else that treats every place of a sequence alike on this rank's part of the sequence.

    Parameters are whole on every rank, DTensors Replicate. Each rank has a summand of their gradients: they are added up, so the
    replicas stay equal bit for bit.

    Args:
        sequence_dim: the dim of the input, ``(batch, sequence, ...)`` by default, that is cut. A plain input is taken for this
            rank's part; a DTensor is redistributed to it.
        input_layouts: how a plain input lies, if not so: Replicate() for one that is whole on every rank.
        use_local_output: whether the result is handed out as this rank's plain part, or as a DTensor (default).
        local: whether forward runs on plain pieces of the input and plain parameters. Default: for LayerNorm and RMSNorm of the
            framework; everything else runs on DTensors, which is right for any forward (dropout gives one process' mask), and
            costs some microseconds per operation. Say True for a norm of your own.
        uneven: as for :class:`hp_tp.ColwiseParallel`.

    Communication per call: none for a cut input, in backward one all-reduce of each parameter's gradient.
    ValueError for a first argument that is no tensor, and a sequence_dim that it does not have.
    Source: Korthikanti et al. (arXiv 2205.05198).
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        input_layouts: Placement | None = None,
        use_local_output: bool = False,
        local: bool | None = None,
        uneven: bool = False,
    ) -> None:
        if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int):
            raise ValueError(f"SequenceParallel: sequence_dim must be a dim such as 1, got {sequence_dim!r}")
        self.sequence_dim = sequence_dim
        self.input_layouts = check_layout(input_layouts, "SequenceParallel: input_layouts")
        self.use_local_output = check_flag(use_local_output, "SequenceParallel: use_local_output")
        self.local = local if local is None else check_flag(local, "SequenceParallel: local")
        self.uneven = check_flag(uneven, "SequenceParallel: uneven")

    def check(self, module: Module, device_mesh: Any) -> None:
        """Raise what :meth:`apply` would raise, and change nothing."""
        check_line(device_mesh, "SequenceParallel")
        modules = [each for _, each in get_platform().named_modules(module)]
        for each in modules:
            check_unplaced(each, "SequenceParallel")
        if self.local and len(modules) > 1:
            raise ValueError(
                f"SequenceParallel of {type(module).__name__}: local=True is for modules without sub-modules, this one has "
                f"{len(modules) - 1}: apply the style to them"
            )

    def lays_out(self, module: Module) -> list[Module]:
        """The modules whose parameters become DTensors: those that have some, of all inside."""
        platform = get_platform()
        return [
            each
            for _, each in platform.named_modules(module)
            if [*platform.named_parameters(each, recurse=False)]
        ]

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Let the parameters be DTensors that are whole everywhere, and forward run on parts of the sequence."""
        self.check(module, device_mesh)
        platform, what = get_platform(), f"SequenceParallel of {type(module).__name__}"
        is_known = platform.layer_kind(module) in _OF_EACH_ROW
        for _, each in list(platform.named_modules(module)):
            names = [
                name for name, _ in platform.named_parameters(each, recurse=False, remove_duplicate=False)
            ]
            place(each, device_mesh, dict.fromkeys(names, Replicate()), self.src_data_rank)
        wanted = Shard(self.sequence_dim)
        given = wanted if self.input_layouts is None else self.input_layouts
        platform.override_forward(
            module,
            AlongSequence(
                make_door(device_mesh, given, self.uneven, what),
                wanted,
                self.use_local_output,
                is_known if self.local is None else self.local,
                is_known,
            ),
        )
        return module


@dataclass(frozen=True)
class AlongSequence:
    """The forward of a module whose input is cut along the sequence."""

    door: Door
    wanted: Shard
    use_local: bool
    is_local: bool
    """Whether forward runs on plain pieces."""
    is_of_rows: bool
    """Whether it is a norm of the framework, over the last dims."""

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        door = self.door
        x = first_argument(args, kwargs, door.what)
        if (
            not isinstance(x, DTensorMethods)
            and self.use_local
            and door.layout == self.wanted
            and self._runs_on_pieces(module, len(x.shape))
        ):
            return self._on_pieces(module, own, x, args[1:], kwargs)
        if get_platform().is_compiling():
            raise ValueError(
                f"{door.what}: compiled code takes and gives plain pieces: say use_local_output=True, local=True for a norm that "
                f"is not the framework's, and input_layouts=Shard({self.wanted.dim}) in the styles behind it"
            )
        x = as_dtensor(x, door)
        spec = make_spec(door.mesh, [self.wanted], x.shape)
        if x._spec is not spec:
            x = x.redistribute(placements=[self.wanted])
        (placement,) = spec.placements
        if self.use_local:
            check_even(x.shape, placement, door, -1)
        if self._runs_on_pieces(module, len(spec.shape)):
            y = self._on_pieces(module, own, x._local, args[1:], kwargs)
            if self.use_local:
                return y
            return DTensor._wrap(y, make_spec(door.mesh, [placement], _shape_like(y, spec)))
        y = own(x, *args[1:], **kwargs)
        if y.placements != spec.placements:
            y = y.redistribute(placements=[placement])
        return y.to_local() if self.use_local else y

    def _runs_on_pieces(self, module: Module, ndim: int) -> bool:
        """Whether plain pieces will do. Not where a norm looks at several places of the sequence together: DTensors know how."""
        if not (self.is_local and self.is_of_rows):
            return self.is_local
        return self.wanted.dim % ndim < ndim - len(module.normalized_shape)

    def _on_pieces(
        self, module: Module, own: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        platform = get_platform()
        shown = {}
        for name, _ in platform.named_parameters(module, recurse=False, remove_duplicate=False):
            shown[name] = summed_over(local_of(platform.get_parameter(module, name)), self.door)
        return run_with(module, shown, own, (x, *args), kwargs)

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        num_ranks = self.door.mesh.shape[0]
        if num_ranks == 1:
            return Collectives()
        platform, row = get_platform(), None
        parameters = list(platform.named_parameters(module))
        if self.is_of_rows and parameters and len(module.normalized_shape) == 1:
            row = nbytes_of(parameters[0][1])
        stays = self.use_local and self.door.layout == self.wanted and self.is_local
        asked = of_sizes(self.door.layout, self.door.uneven and not stays)
        taken = of_move(self.door.layout, self.wanted, "a plain input", row, num_ranks)
        return asked.and_then(taken).and_then(Collectives((), of_parameters(parameters)))


def _shape_like(y: Any, spec: Any) -> tuple[int, ...]:
    """The whole shape of a result whose other dims may have changed."""
    dim = spec.placements[0].dim
    return (*y.shape[:dim], spec.shape[dim], *y.shape[dim + 1 :])
