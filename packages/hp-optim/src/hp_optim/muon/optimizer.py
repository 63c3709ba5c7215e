"""Muon: what the class consists of, whatever the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hp_optim.base import STEP, OptimizerSteps, gradient_of, own_gradient
from hp_optim.checks import PARAMS
from hp_optim.groups import Group
from hp_optim.muon import placed
from hp_optim.muon.batches import Batch
from hp_optim.muon.checks import check_group
from hp_optim.muon.coefficients import DEFAULT_SET, DEFAULT_STEPS, Coefficients
from hp_optim.muon.devices import Devices
from hp_optim.muon.kinds import TRANSFORM, TransformFn, kind_of
from hp_optim.muon.matrices import Split, check_patterns, matrices_of, rule_for
from hp_optim.muon.newton_schulz import MEMORY_CAP
from hp_optim.muon.offloaded import OffloadedStep
from hp_optim.muon.pipeline import run
from hp_optim.muon.placed import BUFFER, device_of_iteration, named
from hp_optim.muon.plan import Known, Plans
from hp_optim.muon.scale import DEFAULT_RULE, MATCHED_ADAMW_RMS, ScaleRule, scale_rule
from hp_optim.muon.step import Step, Updated
from hp_optim.offload.home import OFFLOAD_STATE
from hp_optim.offload.transfers import Transfers
from hp_optim.pieces import local_of

_FUNCTIONS = ("split", "scale", TRANSFORM)
"""Options that may be functions, which no state dict holds."""


class MuonSteps(OptimizerSteps):
    """Muon: momentum whose matrices are made orthogonal (Keller Jordan, kellerjordan.github.io/posts/muon, 2024; with decoupled
    weight decay and AdamW's learning rates, Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982).

    For every matrix of every parameter, with its gradient ``g``::

        buf <- momentum * buf + g
        u    = momentum * buf + g  (nesterov)  or  buf
        U    = Newton-Schulz(u)
        p   <- p (1 - lr * weight_decay) - lr * matched_adamw_rms * sqrt(max(rows, cols)) * U

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts) whose keys overrule the options below. Plain tensors, or
            DTensors on any meshes in any placements but Partial: cut along any dims, in any order, unevenly, empty, ragged,
            replicated. Of two dims and more; give vectors, embeddings and heads to AdamW.
        lr: a number, or a tensor of one element; on the host it is read, on the device it stays there.
        weight_decay: decoupled; multiplied by ``lr``.
        matched_adamw_rms: root mean square of an update for ``lr`` 1: with the usual 0.2 AdamW's learning rates can be kept.
        momentum: at least 0 and below 1.
        nesterov: whether the gradient counts once more beside the momentum.
        ns_steps: Newton-Schulz iterations, any number of at least 1.
        ns_coefficients: ``"asym5"``, ``"quintic"``, ``"polar-express"``, or triples: :mod:`hp_optim.muon.coefficients`.
        ns_dtype: of the iteration; None: bfloat16 where the device computes it, else float32.
        ns_transform_fn: None for Newton-Schulz, or what takes its place: a function that gets whole matrices as a stack ``(b, rows, cols)``
            in ``ns_dtype`` and returns what they become, a tensor of the same shape on the same device; :func:`hp_optim.sinkhorn`, or
            your own, with a ``scale`` that suits it. It must neither communicate, nor depend on which matrices are stacked together, nor
            return memory that it writes again: [Note: functions of the caller] in :mod:`hp_optim.muon.transform`. A group that has one
            uses no ``ns_steps`` and ``ns_coefficients``, and may not be given other ones than the usual; it may inherit them.
        scale: ``"match_rms_adamw"`` as above, ``"original"``, ``"spectral"``, ``"none"``, or a function ``(rows, cols) -> factor``.
        split: which matrices parameters consist of, where their shape does not say: :mod:`hp_optim.muon.matrices`. By shape:
            ``(m, n)`` one, ``(e, m, n)`` one for each expert, 4 and 5 dims are convolutions.
        memory_cap: bytes of working memory for the matrices of a batch on their owner, at least those of one matrix. Three batches
            are under way at a time. Groups travel together: the smallest cap counts for all of them. A function of the caller's is taken to
            need two copies of its stack in 32 bits at most, besides argument and result: give less memory to one that takes more.
        offload_state: keep the momentum of parameters that lie on a device in page-locked memory of the host. It comes and goes with
            the batches on streams of its own; the device holds that of two batches during a step, and none between steps. Bits
            and state dicts are those without. No effect where a device has no memory of its own (cpu).

    State: ``momentum_buffer``, in the dtype of the gradient, a DTensor placed as its parameter; it is made at the first gradient.
    Parameters on the host (offloaded) have it there; their matrices are orthogonalised on the device of the mesh.

    Communication: every matrix has one owner among the ranks that hold some of it (replicas, too), balanced by cost, the same
    at every step. Per batch one all-to-all to the owners and one back: a rank sends what it holds of matrices that it does not
    own, and gets as much back, in ``ns_dtype`` (rounded before it is sent; float16 goes in float32 on the way to the owner). An
    owner of a replicated matrix sends the result to all replicas, and gathers in its own. Matrices that one rank holds, as of
    experts cut over the first dim, cost none. The exchanges of the next and the last batch run below the iteration of the
    present one; the host does not wait for the device. At the first step, and whenever other parameters have a gradient than
    ever before, ranks compare through the key-value store which parameters do; all must have the same
    (:mod:`hp_optim.muon.plan`).

    Values: a sharded step has the momentum of the unsharded one to the bit, and its update to rounding of ``ns_dtype``; replicas
    stay equal to the bit.

    Errors: ValueError for vectors, placements, options and rules that do not fit, and TypeError or ValueError on the owner of a matrix of
    which ``ns_transform_fn`` makes something else, in the midst of the step; RuntimeError on all ranks that meet for the first time
    with gradients of different parameters or functions of different names; where one of them comes with parameters that it had
    before, the others end by the group's time-out.
    """

    HYPERPARAMETERS: ClassVar[frozenset[str]] = frozenset(
        (
            "lr",
            "weight_decay",
            "matched_adamw_rms",
            "momentum",
            "nesterov",
            "ns_steps",
            "ns_coefficients",
            "ns_dtype",
            TRANSFORM,
            "scale",
            "split",
            "memory_cap",
            OFFLOAD_STATE,
        )
    )

    def __init__(
        self,
        params: Any,
        lr: Any = 0.02,
        weight_decay: float = 0.1,
        matched_adamw_rms: float = MATCHED_ADAMW_RMS,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = DEFAULT_STEPS,
        ns_coefficients: str | Coefficients | Sequence[Sequence[float]] | Sequence[float] = DEFAULT_SET,
        *,
        ns_dtype: Any = None,
        ns_transform_fn: TransformFn | None = None,
        scale: str | ScaleRule = DEFAULT_RULE,
        split: Split = None,
        memory_cap: int = MEMORY_CAP,
        offload_state: bool = False,
        **unknown: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "matched_adamw_rms": matched_adamw_rms,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            TRANSFORM: ns_transform_fn,
            "scale": scale,
            "split": split,
            "memory_cap": memory_cap,
            OFFLOAD_STATE: offload_state,
        }
        super().__init__(params, defaults, unknown)
        labels = [[label for _, label in named(group)] for group in self.param_groups]
        check_patterns(type(self).__name__, [group["split"] for group in self.param_groups], labels)

    def _check_group(self, group: Group) -> None:
        check_group(self.platform, type(self).__name__, group, getattr(self, "defaults", group))
        self._check_offload(group)

    # --- state dicts
    def state_dict(self) -> dict[str, Any]:
        """``{"state": ..., "param_groups": ...}``, sharded; nothing is copied or communicated. ``split``, ``scale`` and ``ns_transform_fn`` are
        left out where they are functions; a parameter that never had a gradient has no entry in the state.
        """
        found = super().state_dict()
        for group in found["param_groups"]:
            for key in (key for key in _FUNCTIONS if callable(group.get(key))):
                del group[key]
            if group["ns_dtype"] is not None:
                group["ns_dtype"] = self.platform.dtype_name(self.platform.dtype(group["ns_dtype"]))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take groups and state of a dict of :meth:`state_dict` from the same shards; values are copied. Functions stay, whatever the dict
        has in their place, and so does what it leaves out because it was a function there.
        """
        own = [
            {key: group[key] for key in _FUNCTIONS if callable(group[key]) or key not in given}
            for group, given in zip(self.param_groups, state_dict["param_groups"], strict=False)
        ]
        super().load_state_dict(state_dict)
        for group, kept in zip(self.param_groups, own, strict=True):
            group.update(kept)

    # --- a step
    def _forget_plans(self) -> None:
        self._plans: Plans | None = None
        self._known: list[Known] = []
        self._seen: list[Any] = []

    def _update(self) -> None:
        entries = self._entries
        with_state = {parameter for parameter, entry in entries.items() if entry}
        try:
            updated, transfers, present, seen = self._gathered()
            batches, devices = self._planned(present, seen)
        except BaseException:  # a step that is refused leaves nothing behind
            for parameter in [each for each in entries if each not in with_state]:
                del entries[parameter]
            raise
        for group in self.param_groups:
            group[STEP] = group[STEP] + 1

        def name_of(position: int) -> str:
            return self._known[present[position]].name

        if not transfers:
            run(self.platform, batches, Step(self.platform, updated, devices, name_of), devices)
            return
        step = OffloadedStep(self.platform, updated, devices, name_of, batches, transfers)
        try:
            run(self.platform, batches, step, devices)
        finally:  # also if a step fails: the memory of its copies is dropped
            step.end()

    def _planned(self, present: list[int], seen: list[Any]) -> tuple[list[Batch], Devices]:
        if self._plans is None:
            cap = min(group["memory_cap"] for group in self.param_groups)
            self._plans = Plans(self.platform, cap)
        if seen != self._seen:
            # Forgotten first: what is refused now is looked at again by the next step.
            self._seen = []
            self._known, self._seen = self._describe(), seen
        return self._plans.batches(self._known, present), self._plans.devices

    def _gathered(self) -> tuple[list[Updated], dict[int, Transfers], list[int], list[Any]]:
        """What is updated; the ways to momentum on the host; which of all parameters these are; and what plans depend on of each."""
        platform, entries = self.platform, self._entries
        updated: list[Updated] = []
        on_host: dict[int, Transfers] = {}
        present: list[int] = []
        seen: list[Any] = []
        position = 0
        for number, group in enumerate(self.param_groups):
            seen.append(
                [group[key] for key in ("ns_steps", "ns_coefficients", "ns_dtype", TRANSFORM, "split")]
            )
            scale = scale_rule(group["scale"], group["matched_adamw_rms"])
            options = (group["weight_decay"], group["momentum"], group["nesterov"], scale, number)
            rates: dict[str, Any] = {}
            ways: dict[str, Transfers | None] = {}
            home = self._home_of(group)
            for parameter in group[PARAMS]:
                gradient = gradient_of(parameter)
                local = platform.detach(local_of(parameter))
                storage = platform.device_of(local)
                if gradient is None:
                    kept = self._kept(parameter)
                else:
                    if storage not in rates:
                        rates[storage] = placed.rate_on(platform, group["lr"], storage)
                        ways[storage] = home.transfers(storage)
                    own = own_gradient("Muon", parameter, gradient)
                    momentum = placed.momentum_of(platform, home, entries[parameter], parameter, own, storage)
                    kept = momentum.dtype
                    way = ways[storage]
                    if way is not None:
                        on_host[len(updated)] = way
                    present.append(position)
                    updated.append(Updated(local, own, momentum, rates[storage], *options))
                seen.append((getattr(parameter, "_spec", None), kept, storage))
                position = position + 1
        return updated, on_host, present, seen

    def _kept(self, parameter: Any) -> Any:
        """The dtype of its momentum; of itself, if it has none yet."""
        # get: the state is a dict that makes what is asked for.
        state = self._entries.get(parameter)
        return state[BUFFER].dtype if state else parameter.dtype

    def _describe(self) -> list[Known]:
        """All parameters, in their order."""
        platform = self.platform
        rank = next(
            (
                p.device_mesh.get_rank()
                for group in self.param_groups
                for p in group[PARAMS]
                if hasattr(p, "device_mesh")
            ),
            0,
        )
        found: list[Known] = []
        functions: list[TransformFn] = []
        for group in self.param_groups:
            for parameter, label in named(group):
                shape = tuple(parameter.shape)
                storage = platform.device_of(local_of(parameter))
                spec = getattr(parameter, "_spec", None)
                device = device_of_iteration(platform, spec, storage)
                placed.check_momentum(self._entries.get(parameter), parameter, label)
                found.append(
                    Known(
                        name=label or f"parameter {len(found)}",
                        spec=spec,
                        shape=shape,
                        matrices=matrices_of(shape, rule_for(label, shape, group["split"]), name=label),
                        kind=kind_of(platform, group, device, functions),
                        kept=self._kept(parameter),
                        device=device,
                        storage=storage,
                        rank=rank,
                    )
                )
        return found
