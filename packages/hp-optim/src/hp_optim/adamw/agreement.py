"""Whether replicas that divide a step have gradients of the same parameters.

[Note: gradients that replicas lack] Who has no gradient of a parameter does not take part in gathering its pieces. If others did,
the collective would differ between ranks: they would wait for ever, or get pieces of something else. So whenever a rank lacks gradients
of a combination of parameters that it has not met before (at the first step, too) it tells the replicas, and all of them raise if
they differ. Later steps with the same combination tell nobody anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hp_platform import CollectiveTimeoutError, ProcessGroup
from hp_platform.meeting import told

Ranks = tuple[int, ...]


class Agreement:
    """What the replicas of an optimizer have agreed on so far."""

    def __init__(self) -> None:
        self._agreed: set[tuple[Ranks, Ranks]] = set()

    def check(
        self, groups: Iterable[ProcessGroup], absent: Mapping[Ranks, Sequence[tuple[int, str]]]
    ) -> None:
        """``absent``: by the ranks of a group of replicas, number and name of the parameters that have no gradient here.

        Communication: at the first time with these, texts through the key-value store. RuntimeError on all ranks of a group that
        differ; nothing has been updated then.
        """
        for group in groups:
            found = absent.get(group.ranks, ())
            key = (group.ranks, tuple(number for number, _ in found))
            if key not in self._agreed:
                _agree([f"{number} ({name})" for number, name in found], group)
                self._agreed.add(key)


def _agree(lacking: Sequence[str], group: ProcessGroup) -> None:
    try:
        texts = told(", ".join(lacking), group)
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(
            f"AdamW: rank {group.global_rank} steps with a combination of gradients that it has not met before, and waits for its "
            f"replicas, the {group.describe()}, to agree; a rank did not come: all of them call step() alike, with gradients of the "
            f"same parameters. {error}"
        ) from error
    if len(set(texts)) > 1:
        said = "; ".join(
            f"rank {rank} lacks that of {text or 'none'}"
            for rank, text in zip(group.ranks, texts, strict=True)
        )
        raise RuntimeError(
            f"AdamW: replicas that divide a step have gradients of different parameters: {said}. Give all of them a gradient (zeros, where "
            "one has none) or none, or divide nothing: divide_replicas=False"
        )
