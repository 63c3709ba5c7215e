"""Random numbers of sharded tensors: which elements a rank draws, from which stream, and what is written where.

Read :mod:`places`, :mod:`writing`, :mod:`dropout`; the public functions stand in :mod:`hp_dtensor.random`, what dispatch does
with the framework's own random functions in :mod:`hp_dtensor.rules.random`.
"""
