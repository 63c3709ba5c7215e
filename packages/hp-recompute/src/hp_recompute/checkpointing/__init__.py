"""Activation checkpointing: what backward needs of a function is computed again instead of kept.

Read :mod:`region` first (one checkpointed call), then :mod:`inputs` (how its arguments are kept), :mod:`surroundings` (what a
second run must find as the first did), and :mod:`calls` and :mod:`wrappers` (what users call).
"""
