"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations (api: :class:`hp_optim.Muon`, :func:`hp_optim.sinkhorn`).

Read in this order: :mod:`coefficients` (the polynomials), :mod:`newton_schulz` (batches of matrices), :mod:`matrices` (of which
matrices a parameter is made), :mod:`scale` (how large an update is); :mod:`kinds`, :mod:`transform` and :mod:`sinkhorn` (what else may
take the place of the iteration). Then what sharding adds: :mod:`parts` (who holds what of a
matrix), :mod:`owners` (who orthogonalises it), :mod:`routes`, :mod:`batches`, :mod:`exchange` and :mod:`pipeline` (how it gets
there and back), :mod:`step`, :mod:`plan` and :mod:`optimizer`.
"""
