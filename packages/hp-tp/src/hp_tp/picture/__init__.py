"""What a plan does, as text and as a drawing: :mod:`stages` (what it does at each door), :mod:`drawing` (the lines), :mod:`shown_plan` (the face)."""

from hp_tp.picture.shown_plan import show_plan as show_plan

__all__ = ["show_plan"]
