"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations (api: :class:`hp_optim.Muon`).

Read in this order: :mod:`coefficients` (the polynomials), :mod:`newton_schulz` (batches of matrices), :mod:`matrices` (of which
matrices a parameter is made), :mod:`scale` (how large an update is).
"""
