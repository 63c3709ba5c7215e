"""Functions that change the shape and move no value."""

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "view": "view reshape",
    "view_as": "view_as reshape_as",
    "flatten": "flatten",
    "unflatten": "unflatten",
    "squeeze": "squeeze",
    "unsqueeze": "unsqueeze",
    "permute": "permute",
    "transpose": "transpose swapaxes swapdims",
    "t": "t",
    "expand": "expand broadcast_to",
}

PRIMITIVES: Final[dict[str, str]] = {
    "view": "Reshape View",
    "flatten": "FlattenExt",
    "unflatten": "Unflatten",
    "squeeze": "Squeeze",
    "unsqueeze": "ExpandDims ExpandDimsView",
    "permute": "Transpose TransposeView",
    "transpose": "TransposeExtView TransposeExt",
    "t": "TExt",
    "expand": "BroadcastTo BroadcastToView ExpandDimsTo",
}
