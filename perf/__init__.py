"""Benchmarks: Glulam against its peers and against the machine's limits.

`python -m perf forward|host|graph|train [--out FILE]` measures on the present GPU and writes one JSON file;
`python -m perf report` turns the files of perf/results into tables. Deciding what to measure, and turning
samples into numbers and tables, is plain Python that needs no GPU.
"""
