"""Training curves of AdamW and Muon beside each other, for the guide of the optimizers: `nox -s training-curves`.

Read in this order: :mod:`runs` (what is trained), :mod:`curves` (what it has left), :mod:`drawing`.
"""
