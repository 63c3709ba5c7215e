"""Sharded checkpoints: safetensors files and a JSON index, read and written by every layout, number of ranks and framework.

Read in this order: :mod:`nest` (names), :mod:`boxes`, :mod:`safetensors_file`, :mod:`sources` (what a rank holds),
:mod:`agreement` and :mod:`plan` (who writes what), :mod:`folders` and :mod:`rendezvous` (when it counts), :mod:`saving`,
:mod:`background`, :mod:`stored`, :mod:`loading`, :mod:`growing_file`, :mod:`huggingface`.
"""
