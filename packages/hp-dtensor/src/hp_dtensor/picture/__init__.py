"""Which rank holds which block of a tensor, as text in a terminal or as a drawing in a file."""

from hp_dtensor.picture.shown_blocks import show as show
