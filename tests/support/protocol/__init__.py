"""Models of three protocols, with a search through every order of their events.

The protocols: ranks of the symmetric transport exchange rows; warp roles of a kernel hand over tiles; kernels of a call
overlap.

Ranks: each rank has a window, which the others store to. For each source rank the window holds rows X (of dispatches)
and Y (of combines), ids, and words of 64 bits. The word `data` says that the source's part of a dispatch is here,
`sums` the same of a combine, `enter` that the source is done with all ops before, `abort` that it gave up. All ranks
run the same list of ops, each rank on one stream, and the words of an op carry its epoch:

    D1    dispatch, which makes handle 1: ids and rows to X, then `data`; wait for `data` of all; read
    B1    backward's dispatch by handle 1: the same without ids
    C1    combine of what handle 1 dispatched last: rows to Y, then `sums`; wait for `sums` of all; read

There is one X and one Y, so an op may overwrite them only after all ranks have read their content. X is read until the
combine of its dispatch or, if that comes first, the next dispatch; Y is read within its op. So a rank may dispatch when
it has `sums` of the latest dispatch's combine, and may combine when it has `data`. If the op before gave no such word,
ranks first exchange `enter`.

Files on ranks, in reading order: ops.py (rules, and the steps of a rank's stream), ranks.py (windows, and stores that
have not landed), ctas.py (one rank's kernels), search.py. `python -m tests.support.protocol` runs the sizes that
tests/test_protocol.py has no time for. Files on roles: gemm.py (each protocol of persistent kernels, and ways to break
it), barriers.py. Files on kernels that overlap: overlap.py (early launches), calls.py (kernels' steps, and calls of all
shipped functions).
"""
