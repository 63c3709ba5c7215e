"""``check_spmd``: values and gradients compared with what their placements declare, after every operation.

:mod:`block` is the public face, :mod:`watcher` what happens around one operation, :mod:`unsharded` the operation on whole
tensors, :mod:`agreement` how ranks compare and come to the same verdict.
"""
