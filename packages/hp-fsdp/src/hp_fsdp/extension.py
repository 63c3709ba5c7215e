"""Parameters that say themselves what is gathered of them: quantised weights, for instance.

[Note: extensions] A parameter has an extension if an object with the two hooks of :class:`ParameterExtension` stands in its attribute
``_hp_fsdp_extension`` when it is sharded, or if it is of a tensor subclass with these methods (then the piece is ``self`` and
the first argument is left out, as in PyTorch's FSDP2). Of such a parameter travels what the first hook makes of the piece, and
the second one makes the whole parameter of what has come from all ranks. Gradients of whole parameters are reduced as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from hp_fsdp.peers import Peers
from hp_fsdp.places import Places
from hp_platform import collectives
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor

EXTENSION = "_hp_fsdp_extension"
"""Attribute of a parameter that holds its extension."""
OUT = "out"
"""The keyword of PyTorch's protocol for what the second hook fills."""


class ParameterExtension(Protocol):
    """What to set as ``parameter._hp_fsdp_extension`` before ``fully_shard``. Both hooks run without gradients, on all ranks."""

    def fsdp_pre_all_gather(self, shard: Tensor, mesh: Any) -> tuple[Sequence[Tensor], Any]:
        """``(tensors, metadata)`` of this rank's piece, before every gather.

        Args:
            shard: ``(rows, ...)`` on the mesh's device, in the original dtype; every rank has the same number of rows, the last
                ones zeros where the whole does not divide. Read only.
            mesh: over which the parameter is sharded.

        ``tensors``: what travels, plain and contiguous, of any dtype that the backend takes (a float8 one goes as a view of
        ``uint8`` where it does not), of the same shapes on all ranks and at every call. ``metadata``: for the other hook.
        """
        ...

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: DType, *, out: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Tensor]] | None:
        """The whole parameter, after every gather.

        Args:
            outputs: one for each of ``tensors``, the ranks' ones behind each other along dim 0; where that are as many as the
                padded rows, only those of the whole. The same objects every time.
            metadata: this rank's.
            dtype: that of the computation (``MixedPrecisionPolicy.param_dtype``, or the original one).
            out: None at the first time. Later what the first time has returned: its memory is there again, and is to be filled.

        Returns, if ``out`` is None, the parameter for forward (of the whole shape; a subclass that computes in its own way, if
        it likes) and the tensors that it keeps its values in: their memory is freed with that of other whole parameters. They
        are made by this hook, or are some of ``outputs``. If ``out`` is given, None.
        """
        ...


def has_extension(platform: Platform, parameter: Any, local: Tensor) -> bool:
    """Whether a parameter, or the class of its local tensor, has the hooks. ValueError for half of them."""
    given = getattr(parameter, EXTENSION, None)
    where = type(local) if given is None else given
    found = [callable(getattr(where, name, None)) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")]
    if not all(found) and (given is not None or any(found)):
        kind = (type(local) if given is None else type(given)).__name__
        raise ValueError(
            f"{kind} must have fsdp_pre_all_gather and fsdp_post_all_gather to be the extension of a parameter: see "
            "hp_fsdp.ParameterExtension"
        )
    return all(found)


class ExtendedWhole:
    """The whole tensor of one parameter with an extension; what :class:`hp_fsdp.whole.WholeParameters` is for others."""

    def __init__(self, platform: Platform, param: Any, places: Places) -> None:
        self.platform = platform
        self.param = param
        self.places = places
        self._signature: list[Any] = []
        """Shapes and dtypes of what is received."""
        self._received: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self.storages: list[Tensor] = []
        """Tensors that together are all memory of the whole parameter."""
        self.nbytes: list[int] = []
        """Of each of these, while they are there."""
        # Shape, dtype and device are known before the first gather; memory is not needed.
        place_holder = platform.empty(param.shape, param.compute_dtype, places.device)
        param.set_whole(place_holder, is_alias=False)
        platform.resize_storage_(place_holder, 0)
        self._is_made = False
        self._keeps_received = False
        """Whether the whole parameter lies in what was received."""

    @property
    def fulls(self) -> list[Tensor]:
        """The whole parameter."""
        return [self.param.full]

    def allocate(self) -> None:
        """Get memory for it again."""
        for storage, nbytes in zip(self.storages, self.nbytes, strict=True):
            self.platform.resize_storage_(storage, nbytes)

    def free(self) -> None:
        """Give the memory back."""
        for storage in self.storages:
            self.platform.resize_storage_(storage, 0)

    def launch(self, async_op: bool, peers: Peers | None) -> Callable[[], None]:
        """Start gathering what the extension makes of the piece; what has to follow.

        Communication: one all-gather over the shard group for each tensor that the extension gives; never through ``peers``.
        """
        platform, group = self.platform, self.places.shard_group
        with platform.recordable():  # what is made here stays
            tensors, metadata = self._tensors()
            self._make_outputs(tensors)
        # See [Note: one whole tensor for ever]: the values are those that autograd has seen before.
        versions = ExitStack()
        versions.enter_context(platform.preserve_version([*self._received, *self.storages, *self.fulls]))
        works: list[Any] = [
            collectives.all_gather(x, group, out=target, async_op=async_op)
            for x, target in zip(tensors, self._received, strict=True)
        ]

        def follow() -> None:
            with versions:
                if async_op:
                    for work in works:
                        work.wait()
                with platform.recordable():
                    self._make_whole(metadata)

        return follow

    def _hook(self, name: str) -> Any:
        given = self.param.extension
        return getattr(self.param.shard if given is None else given, name)

    def _tensors(self) -> tuple[list[Tensor], Any]:
        platform, param = self.platform, self.param
        shard = platform.to_device(platform.detach(param.shard), self.places.device, non_blocking=True)
        missing = param.slot.padded_shape[0] // self.places.num_shards - shard.shape[0]
        if missing:
            zeros = platform.zeros((missing, *param.shape[1:]), param.dtype, self.places.device)
            shard = platform.cat([shard, zeros])
        if param.extension is not None:
            found = param.extension.fsdp_pre_all_gather(shard, self.places.mesh)
        elif hasattr(type(shard), "fsdp_pre_all_gather"):
            found = shard.fsdp_pre_all_gather(self.places.mesh)
        else:
            raise ValueError(
                f"the piece of parameter {param.name!r} has {shard.shape[0] - missing} of {shard.shape[0]} rows and its class, "
                f"{type(param.shard).__name__}, loses itself in padding: implement cat for it, or let the rows divide by the ranks"
            )
        is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (tuple, list))
        if not is_pair or not found[0] or not all(platform.is_tensor(x) and x.ndim for x in found[0]):
            raise ValueError(
                f"fsdp_pre_all_gather of parameter {param.name!r} must return (tensors, metadata), with at least one tensor and "
                f"none of 0 dims, got {type(found).__name__}"
            )
        return [platform.contiguous(x) for x in found[0]], found[1]

    def _make_outputs(self, tensors: list[Tensor]) -> None:
        """Where to receive: at the first time new, later the same if the whole parameter lies in it, else new."""
        platform, ranks = self.platform, self.places.num_shards
        shapes = [((ranks * x.shape[0], *x.shape[1:]), x.dtype) for x in tensors]
        if self._signature not in ([], shapes):
            raise RuntimeError(
                f"fsdp_pre_all_gather of parameter {self.param.name!r} gave other shapes or dtypes than before: from all ranks "
                f"{self._signature}, now {shapes}"
            )
        if self._received:
            return
        self._signature = shapes
        self._received = [platform.empty(shape, dtype, self.places.device) for shape, dtype in shapes]
        rows, padded = self.param.shape[0], self.param.slot.padded_shape[0]
        self._outputs = [
            platform.narrow(x, 0, 0, rows) if x.shape[0] == padded != rows else x for x in self._received
        ]

    def _make_whole(self, metadata: Any) -> None:
        platform, param = self.platform, self.param
        hook, dtype = self._hook("fsdp_post_all_gather"), param.compute_dtype

        def post(target: Tensor | None) -> Any:
            return hook(tuple(self._outputs), metadata, dtype, **{OUT: target})

        if self._is_made:
            post(param.full)
            if not self._keeps_received:
                self._received = self._outputs = []
            return
        found = post(None)
        is_pair = isinstance(found, tuple) and len(found) == 2 and platform.is_tensor(found[0])
        if not is_pair or tuple(found[0].shape) != tuple(param.shape):
            raise ValueError(
                f"fsdp_post_all_gather of parameter {param.name!r} must return (whole, tensors with its values) where out is None, "
                f"the whole one of shape {tuple(param.shape)}, got {type(found).__name__}"
            )
        whole, inner = found
        param.set_whole(whole, is_alias=False)
        received = {platform.data_ptr(x): x for x in self._received}
        kept = {platform.data_ptr(x): x for x in inner}
        self._keeps_received = bool(received.keys() & kept.keys())
        if self._keeps_received:
            kept = {**kept, **received}
        else:
            self._received = self._outputs = []
        self.storages = list(kept.values())
        self.nbytes = [platform.storage_nbytes(x) for x in self.storages]
        self._is_made = True
