"""Tensor parallelism over two mesh dims: weights and activations cut over both.

Read :mod:`panels` (what moves when), :mod:`products` (the three products and their derivatives), :mod:`door` (what a call of the
layer does), :mod:`linear` (the style).
"""
