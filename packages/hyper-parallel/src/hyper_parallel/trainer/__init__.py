"""The reference trainer: a byte-level language model, sharded over processes, in a few files to read from top to bottom.

:mod:`options` and :mod:`sizes` (what can be asked for), :mod:`data`, :mod:`model`, :mod:`optimizer`, :mod:`loop` (the run of one process),
:mod:`checkpoint`, :mod:`report` (bar, plot, metrics), :mod:`generate`, :mod:`verify` (the same job in one process),
:mod:`command` (``hyper-parallel train``).
"""
