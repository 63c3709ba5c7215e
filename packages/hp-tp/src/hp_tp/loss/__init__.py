"""Losses over classes that are cut over ranks: no rank ever holds the logits of all.

Read in this order: :mod:`rows` (the formula), :mod:`classes` (who has what), :mod:`cross_entropy` and :mod:`log_softmax` (the autograd
Functions), :mod:`vocab_parallel` (for plain tensors), :mod:`rules` and :mod:`context` (for DTensors), :mod:`linear` (together with the
product that makes the logits).
"""
