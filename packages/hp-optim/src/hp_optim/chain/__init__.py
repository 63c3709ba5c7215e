"""Several optimizers of one model as one: which parameter goes where, and one state by the names of parameters.

Read in this order: :mod:`routing` (the rule), :mod:`table` (the routing as text), :mod:`flat_names` (the other form of a state
dict), :mod:`chained_optimizer`, :mod:`hyper_optimizer`.
"""
