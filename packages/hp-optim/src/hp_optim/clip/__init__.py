"""Norms of gradients that lie over many ranks, and clipping by them.

Read in this order: :mod:`orders` (how norms of parts make that of the whole), :mod:`gradients` (what there is on this rank),
:mod:`shares` (which part of it this rank adds, and to which group), :mod:`norms` (the public functions).
"""
