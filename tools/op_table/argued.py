"""Moves that the trial, of values alone and forward only, would call unneeded: why they are made."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Argued:
    """A reason, and the combinations of placements that it is for; whatever else of its rules is over-cautious is marked."""

    rules: tuple[str, ...]
    combinations: tuple[str, ...]
    """As the table writes them; ``*`` stands for anything, ``?`` for one character."""
    why: str
    calls: str = "*"
    """The calls that it is for, likewise."""

    def is_for(self, rule: str, call: str, combination: str) -> bool:
        """Whether it says why this combination is moved."""
        return (
            rule in self.rules
            and fnmatchcase(call, self.calls)
            and any(fnmatchcase(combination, pattern) for pattern in self.combinations)
        )


ARGUED = (
    Argued(("nansum", "nanmean"), ("P",), "a share of a sum may be NaN, or hide one"),
    Argued(
        ("embedding", "embedding_bag"),
        ("S(0), R",),
        "with `scale_grad_by_freq` its gradient counts all places of the batch",
        "*scale_grad_by_freq=True*",
    ),
    Argued(
        ("embedding_bag",),
        ("R, *, S(0)", "R, *, P"),
        "the call that is tried knows its bags, whatever `offsets` say",
        "in_two_bags(*",
    ),
    Argued(
        ("hinge_embedding_loss",), ("*, P",), "no target that is drawn for the trial is 1 or -1, as all are"
    ),
    Argued(
        ("scatter", "index_copy", "put"),
        ("P, R, P",),
        "of the values for a place that is named twice frameworks keep any, each rank perhaps another one's share",
    ),
    Argued(
        ("put",),
        ("P, S(0), S(0)",),
        "pieces of places and values of different shapes belong together only where both are cut evenly",
        "put(*, 2x3, 6, True)",
    ),
    Argued(
        ("searchsorted", "bucketize"),
        ("S(?)", "S(?), R", "R, S(0)"),
        "boundaries are fewer than values, so joining them moves less than reducing places; NaN behind them is found by halving",
    ),
    Argued(
        ("masked_select", "getitem"),
        ("P, R*", "S(?), R"),
        "how large the result of a mask is, the values say, so all ranks get it whole",
        "*mask*",
    ),
    Argued(
        ("bincount",),
        ("S(0), S(0)", "R, P"),
        "how large the result of counting numbers is, the values say, so all ranks get it whole",
    ),
    Argued(
        ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm"),
        ("R, P", "R, P, P", "R, R, R, P, P", "P, P, R, R, P"),
        "a weight or statistic that is a sum is smaller than the result, which would be the sum otherwise",
    ),
    Argued(
        ("scaled_dot_product_attention",),
        ("R, R, S(?)*",),
        "fused kernels take values only with as many channels per head as queries have",
    ),
)


def reason(rule: str, call: str, combination: str) -> str | None:
    """Why a combination of a call is moved that could stay, as far as the trial sees; None: nobody has said."""
    return next((entry.why for entry in ARGUED if entry.is_for(rule, call, combination)), None)
