"""AdamW as users see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_optim.adamw.agreement import Agreement
from hp_optim.adamw.member import FOREIGN_STEP, count_of, foreign_count
from hp_optim.adamw.plan import Found, GroupPlan
from hp_optim.adamw.replicas import Place, gather_pieces
from hp_optim.base import STEP, OptimizerSteps
from hp_optim.checks import PARAMS, check_learning_rate, check_number
from hp_optim.groups import Group
from hp_optim.offload.home import OFFLOAD_STATE
from hp_optim.offload.streaming import BUCKET_NBYTES, OFFLOAD_BUCKET
from hp_optim.pieces import local_of
from hp_platform import ProcessGroup
from hp_platform.platform import require


class AdamWSteps(OptimizerSteps):
    """Adam with decoupled weight decay, on plain tensors and on the local tensors of DTensors.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with ``"params"`` and hyperparameters of their own).
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: parameters are multiplied by ``1 - lr * weight_decay`` first.
        amsgrad: divide by the root of the largest second moment so far.
        maximize: go up instead of down.
        fused: one kernel for all parameters; None: on cuda. NotImplementedError for True where there is none.
        divide_replicas: whether state and work of replicated shards are divided over the ranks that hold them; see below.
        offload_state: keep the state of parameters that lie on a device in page-locked memory of the host; see below.
        offload_bucket: bytes of state that are updated at a time then (default 64 MiB); three times as many are on the device during
            a step, and none between steps.

    Step number ``t`` of a parameter with the gradient ``g`` (``-g`` if ``maximize``)::

        p = p (1 - lr weight_decay);  m = m + (g - m)(1 - beta1);  v = beta2 v + (1 - beta2) g g
        p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    It gives the bits of ``torch.optim.AdamW(foreach=False)`` where ``fused`` is off. Steps are counted by group
    (``group["step"]``); a parameter without a gradient is left as it is, and what it has missed is kept in its state, so that
    its ``t`` counts its own steps. State (``exp_avg``, ``exp_avg_sq``, with AMSGrad ``max_exp_avg_sq``) is made with a parameter's
    first gradient; a parameter that never had one has none. Gradients are ``parameter.main_grad`` if that is there, else
    ``parameter.grad``. State has the dtype of the parameter or of its first gradient, whichever is wider, and the step is
    computed in it: beside float32 gradients in ``main_grad`` a bfloat16 parameter has float32 moments, and is rounded at the end of
    every step.

    Shards of ``fully_shard`` are updated as the flat rows that they lie in. Of DTensors on a mesh of two or more dims that are
    Replicate along its first one (HSDP), every replica keeps the state of a piece, cut along dim 0: a DTensor sharded over both. It
    updates that piece, and the pieces are gathered: one all-gather of the local parameters' bytes per step (more where meshes,
    dtypes or devices differ); no other communication in any case. With ``divide_replicas=False`` every replica does everything, and
    there is none. Replicas must have gradients of the same parameters: at the first step, and whenever one lacks others than ever
    before, they compare through the key-value store.

    With ``offload_state`` a step copies the state to the device and back, bucket by bucket on streams of their own, and the host does
    not wait: it takes about as long as its bytes take in one direction (8 per float32 parameter on this rank). Bits, state dicts and
    checkpoints are those without; ``optimizer.state`` waits for copies that are under way. Parameters on the host have their
    state there in any case; where a device has no memory of its own (cpu) it does nothing.

    ValueError for wrong hyperparameters and parameters, unknown arguments, and sparse gradients; RuntimeError on all replicas where
    they have gradients of different parameters.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019 (arXiv 1711.05101); Reddi et al., On the
    Convergence of Adam and Beyond, ICLR 2018 (AMSGrad); Rajbhandari et al., ZeRO, 2020 (division of state over replicas).
    """

    HYPERPARAMETERS = frozenset(
        {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "fused", "divide_replicas"}
    ) | {OFFLOAD_STATE, OFFLOAD_BUCKET}

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        divide_replicas: bool = True,
        offload_state: bool = False,
        offload_bucket: int = BUCKET_NBYTES,
        **unknown: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "fused": fused,
            "divide_replicas": divide_replicas,
            OFFLOAD_STATE: offload_state,
            OFFLOAD_BUCKET: offload_bucket,
        }
        super().__init__(params, defaults, unknown)

    def _check_group(self, group: Group) -> None:
        name = type(self).__name__
        check_learning_rate(self.platform, name, group["lr"])
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"{name}: betas is {betas!r}; it is a pair of numbers such as (0.9, 0.999)")
        for at, beta in enumerate(betas):
            check_number(name, f"betas[{at}]", beta, below=1.0, advice="the share of a moment that stays")
        check_number(
            name, "eps", group["eps"], advice="a small number such as 1e-8 keeps the division finite"
        )
        check_number(
            name,
            "weight_decay",
            group["weight_decay"],
            advice="for none give 0; it is not scaled by batch or ranks",
        )
        for key in ("amsgrad", "maximize", "divide_replicas", "fused"):
            if not (isinstance(group[key], bool) or (key == "fused" and group[key] is None)):
                choice = "True, False or None" if key == "fused" else "True or False"
                raise ValueError(f"{name}: {key} is {group[key]!r}; it must be {choice}")
        self._check_offload(group)
        bucket = group[OFFLOAD_BUCKET]
        if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < 1:
            raise ValueError(
                f"{name}: {OFFLOAD_BUCKET} is {bucket!r}; expected bytes, a whole number of at least 1, as the usual {BUCKET_NBYTES}"
            )
        if group["fused"]:
            for parameter in group.get(PARAMS, ()):
                device = self.platform.device_of(local_of(parameter))
                if not device.startswith("meta"):
                    require(self.platform, "fused_adamw", device, what=f"{name}(fused=True)")

    def state_dict(self) -> dict[str, Any]:
        """As of torch's class, which loads it into its own AdamW: every entry has the parameter's own count, too, as ``step``.

        State that replicas have divided fits this class alone.
        """
        found = super().state_dict()
        state = dict(found["state"])
        for group in found["param_groups"]:
            for number in group[PARAMS]:
                if state.get(number):
                    own = self.platform.full((), float(count_of(group, state[number])), "float32", "cpu")
                    state[number] = {FOREIGN_STEP: own, **state[number]}
        return {**found, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take groups and state of a dict that :meth:`state_dict` made, of this class or of torch's AdamW; values are copied.

        ``offload_state`` and ``fused`` stay as they are: they say how this optimizer runs.
        """
        state = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            for number in group[PARAMS] if STEP in group else ():
                entry = state.get(number, {})
                # The group counts, so that its entries need not; but in what torch's class went on from it stands still.
                if FOREIGN_STEP in entry and foreign_count(self.platform, entry) == count_of(group, entry):
                    state[number] = {key: x for key, x in entry.items() if key != FOREIGN_STEP}
        super().load_state_dict({**state_dict, "state": state})

    def _forget_plans(self) -> None:
        self._plans: list[GroupPlan] = []
        self._agreement = Agreement()

    def _update(self) -> None:
        groups = self.param_groups
        if len(self._plans) != len(groups) or not all(
            plan.fits(group, self._entries) for plan, group in zip(self._plans, groups, strict=True)
        ):
            self._plans = [
                GroupPlan(
                    self.platform,
                    group,
                    self._entries,
                    self._home_of(group),
                    divides=group["divide_replicas"],
                )
                for group in groups
            ]
        found = [plan.look() for plan in self._plans]
        self._agree(found)
        places: list[Place] = []
        for plan, gradients in zip(self._plans, found, strict=True):
            places.extend(plan.step(gradients))
        gather_pieces(self.platform, places)

    def _agree(self, found: Sequence[Found]) -> None:
        """See [Note: gradients that replicas lack]."""
        replicas: dict[tuple[int, ...], ProcessGroup] = {}
        absent: dict[tuple[int, ...], list[tuple[int, str]]] = {}
        first = 0
        for plan, gradients in zip(self._plans, found, strict=True):
            replicas.update(plan.replicas)
            if plan.replicas:
                for ranks, place, name in plan.absent(gradients):
                    absent.setdefault(ranks, []).append((first + place, name))
            first = first + len(plan.group[PARAMS])
        self._agreement.check(replicas.values(), absent)
