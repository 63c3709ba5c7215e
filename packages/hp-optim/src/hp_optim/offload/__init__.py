"""State of optimizers in the memory of the host, and its way through the device during a step.

Read in this order: :mod:`transfers` (copies beside the computation), :mod:`home` (where state lies), :mod:`streaming` (a step of
element-wise updates, bucket by bucket). Muon's momentum travels with its batches: :mod:`hp_optim.muon.offloaded`.
"""
