"""Models of three protocols, with a search through every order of their events: ranks of the symmetric transport that
exchange rows, warp roles of a kernel that hand over tiles, and kernels of a call that overlap.

Ranks: each rank has a window, which the others store to: for each source rows X (of dispatches) and Y (of combines),
ids, and words of 64 bits. `data` and `sums` say that the source's part of an op is here, `enter` that the source is
done with all ops before, `abort` that it gave up. Ranks run one list of ops, each rank on one stream, and an op's words
carry its epoch:

    D1    dispatch, which makes handle 1: ids and rows to X, then `data`; wait for `data` of all; read
    B1    backward's dispatch by handle 1: the same without ids
    C1    combine of what handle 1 dispatched last: rows to Y, then `sums`; wait for `sums` of all; read

There is one X and one Y, so an op may overwrite them only after all ranks have read their content. X is read until the
combine of its dispatch or, if that comes first, the next dispatch; Y within its op. So `sums` of the latest dispatch's
combine let a rank dispatch, and `data` let it combine. Where the op before gave no such word, ranks first exchange
`enter`.

Files on ranks, in reading order: ops.py (rules, and what a rank's stream does), ranks.py (windows and stores on their
way), ctas.py (one rank's kernels), search.py. `python -m tests.support.protocol` runs the sizes that
tests/test_protocol.py has no time for. Files on roles: gemm.py (each protocol of persistent kernels, and ways to break
it), barriers.py. Files on kernels that overlap: overlap.py (early launches), calls.py (kernels' steps, and calls
of all shipped functions).
"""
