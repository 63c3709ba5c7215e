"""Learning-rate schedules: warm-up, then a decay, for one optimizer or a chain of them. No framework is needed for any of it.

Read in this order: :mod:`formulas` (the multiplier of a step), :mod:`config` (what a caller may ask for), :mod:`lr_scheduler`
(one optimizer), :mod:`container` (all optimizers of a model), :mod:`factory`.
"""
