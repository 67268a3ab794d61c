"""Benchmarks: Glulam against its peers and against the machine's limits.

`python -m perf SUITE [--out FILE]` measures on the present GPU and writes one CSV file (`python -m perf --help` lists
the suites); `python -m perf report` turns the files of perf/results into tables and plots. Deciding what to measure,
and turning samples into numbers, tables and plots, is plain Python that needs no GPU.
"""
