"""State of models and optimizers by names, whole or as shards: what packages that keep such state have in common.

Read in this order: :mod:`options`, :mod:`values` (one tensor, made whole, cut, written), :mod:`broadcast` (values that one rank
has), :mod:`optimizer_names`, :mod:`optimizer_loading` and :mod:`optimizer_state` (of any optimizer with ``param_groups`` and
``state``).
"""
