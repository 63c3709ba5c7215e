"""Sharded initialisation: a model is built without memory, sharded, and initialised at the size of its pieces.

:mod:`contexts` (building without memory), :mod:`parameters` (the rest).
"""
