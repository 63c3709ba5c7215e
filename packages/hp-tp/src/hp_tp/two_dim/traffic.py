"""What a linear layer over two mesh dims sends, for :func:`hp_tp.describe`."""

from __future__ import annotations

from typing import Any

from hp_tp.styles.collectives import Collectives, Transfer


def traffic_of(
    weight: Any, mesh_shape: tuple[int, int], moves_input: bool, bias: Any, itemsize: int
) -> Collectives:
    """Of a call and its backward on this rank, all panels of an operand together.

    ``weight`` and ``bias`` (or None) are the DTensors. See [Note: what stays] in :mod:`hp_tp.two_dim.linear`; rows are this rank's.
    """
    num_rows, num_columns = mesh_shape
    moving = min(weight.shape)
    of_row = moving * itemsize
    of_weight = of_row * weight.local_shape[0 if moves_input else 1]

    def along_rows(kind: str, what: str) -> list[Transfer]:
        return [Transfer(kind, f"{what} in panels", nbytes=of_weight)] if num_rows > 1 else []

    def along_columns(kind: str, what: str) -> list[Transfer]:
        return [Transfer(kind, f"{what} in panels", of_row)] if num_columns > 1 else []

    gathered = along_rows("all_gather", "the weight")
    reduced = along_rows("reduce_scatter", "the weight's gradient")
    if bias is not None and num_rows > 1:
        size = bias.local_shape[0] * itemsize
        reduced.append(Transfer("all_reduce", "the bias' gradient", nbytes=size))
    if moves_input:
        forward = along_columns("all_gather", "the input")
        for_input = along_columns("reduce_scatter", "the input's gradient")
        for_weight = forward
    else:
        forward = along_columns("reduce_scatter", "the output")
        for_input = for_weight = along_columns("all_gather", "the output's gradient")
    return Collectives(
        (*forward, *gathered),
        (*gathered, *for_input, *for_weight, *reduced),
    )
