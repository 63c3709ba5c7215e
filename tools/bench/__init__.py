"""Benchmarks against peers: ours and the peer in turn, on the same machine, in one call.

`python -m bench --list` names the cases, `python -m bench <case> ...` runs them; `nox -s bench -- <case>` does so in the
environment of torch. Each case prints one JSON line and one table row, and nothing is quoted without that row.

- `case`: what a case is
- `runner`: build, measure, free, in turn, three rounds, medians
- `row`: the row, as JSON and as a table
- `conditions`: hardware, versions and commit that a row belongs to
- `memory`: the peak memory of a measurement on the host
- `ranks`: processes for cases of more than one rank
- `cases/`: the cases
"""
