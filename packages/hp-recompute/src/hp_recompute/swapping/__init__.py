"""Activation swap: what backward needs of a function waits in the host's memory.

Read :mod:`storage` first (one memory on its way), then :mod:`parcels` (what is copied at once), :mod:`group` (what one call saves),
:mod:`leaving` (which are on their way to the host), :mod:`order` (what is fetched ahead), :mod:`room` (how far), :mod:`manager` (when),
and :mod:`calls` and :mod:`wrappers` (what users call). :mod:`copies` is how copies are made; :mod:`late_copies` makes them as late as it
may, for tests on a device without a memory of its own.
:mod:`choices` is what may become of layers, :mod:`timetable` when they then travel and what it costs, :mod:`budget` chooses, :mod:`fitted`
measures (:mod:`agreed`: for all ranks), and :mod:`course` holds to the timetable.
"""
