"""Sizes of the hyper-connection kernels, on which the host (workspaces, launch arguments) and the kernels must agree.
Plain Python: imports no compiler.

T tokens have n residual streams of C columns each: x is [T, n C]. The projection is p = x weight^T, [T, K] with K = n^2
+ 2n outputs a token. Backward has these further terms:

    dp      the gradient of p
    f       float32, a factor of each token: the RMS norm of x adds f x to d_x, the gradient of x

A slice is a range of x's columns. A part (of the tokens) is a range of token tiles. `itemsize` is the bytes of an
element of the streams.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..architectures import ARCHS

CTAS_PER_SM = 4
"""CTAs on an SM in post_mix's backward. A CTA has 128 threads with up to 128 registers, and stores one row of partial
sums."""

TOKEN_TILE = 16
# Padding in bytes of the weight's rows in shared memory, to 64 bytes more than a multiple of 128: then the 16-byte
# reads of 8 lanes (2 rows, 4 vectors each) use all banks.
ROW_PADDING = 64
GOOD_USE = 0.95
MAX_EXTRA_SLICES = 5
# With an exact (float32) weight: tokens that a warp copies, and multiplies, at a time.
UNIT_TOKENS = 32
MAX_EXACT_SLICES = 48  # with more slices, adding their sums takes longer than they save for few tokens

# Constants of the projection's backward.
GATE_WARPS = 8
GATE_BATCH = 8
"""Tokens that a warp of the gates' backward loads at a time. With 8 tokens and 4 streams, 50 KB of loads are in flight
on an SM."""
GATE_BACKWARD_WARPS = 16
GATE_CTAS_PER_SM = 2
SPREAD_WARPS = 4
SPREAD_CTAS_PER_SM = 3
MAX_SPLITS = 16
MOST_EXACT_TOKENS = 8192
"""The most tokens in one part of the tokens (`spread_splits`) if the weight is float32. The reason is that tensor cores
truncate their sums: a sum over 4681 tokens loses 1e-5 of its value, and more over more tokens."""


class ProjectCta(NamedTuple):
    """Sizes of a CTA of the projection.

    Attributes:
        warps: number of warps.
        smem: bytes of shared memory: a ring of stages of x for each warp, then a slice of the weight's columns.
        step_bytes: bytes of each token of a tile that a warp reads at a time.
    """

    warps: int
    smem: int
    step_bytes: int

    @property
    def stage_bytes(self) -> int:
        return TOKEN_TILE * self.step_bytes


def project_cta(arch: str) -> ProjectCta:
    """Return the sizes of the projection's CTA on an architecture.

    On Hopper, an SM has 64 KB of x in flight. Architectures with 99 KB of shared memory have a quarter of that in
    flight (half as many warps, each with half as many bytes of a row), so that the float32 weight of 8 streams still
    fits.
    """
    smem = ARCHS[arch].smem_bytes - 1024
    return ProjectCta(8, smem, 256) if smem > 128 * 1024 else ProjectCta(4, smem, 128)


def outputs(n: int) -> int:
    """Return K, the number of rows of the projection's weight: n for h_pre, n for h_post, n^2 for h_res."""
    return n * n + 2 * n


def ring_stages(n: int) -> int:
    """Return the number of stages of a warp's ring for x.

    It is 3: two stages are being filled while the third is used. It is 2 for 8 streams, whose weight leaves no room for
    a third stage.
    """
    return 3 if n < 8 else 2


def slice_capacity(cta: ProjectCta, n: int, itemsize: int) -> int:
    """Return the most columns that a slice of the weight can have: as many whole steps of K = n^2 + 2n rows as fit into
    shared memory beside the warps' rings."""
    ring = cta.warps * ring_stages(n) * cta.stage_bytes
    row = (cta.smem - ring) // outputs(n) - ROW_PADDING
    return row // cta.step_bytes * (cta.step_bytes // itemsize)


class Slices(NamedTuple):
    """Division of the projection's columns and tokens over CTAs.

    Attributes:
        slices: number of slices of the columns.
        slice_columns: columns of a slice.
        groups: number of CTAs for each slice; they share the tokens.
    """

    slices: int
    slice_columns: int
    groups: int


def project_slices(
    cta: ProjectCta, n: int, itemsize: int, columns: int, tokens: int, num_sms: int
) -> Slices:  # fmt: skip
    """Divide the projection's columns and tokens over CTAs.

    The result has the fewest slices with which nearly all warps of all SMs are busy to the end. Few slices are better,
    because each slice writes sums for every token.

    columns: n C, the columns of n residual streams.
    """
    step = cta.step_bytes // itemsize
    least = -(-columns // slice_capacity(cta, n, itemsize))
    choices = [
        Slices(s, -(-columns // (s * step)) * step, max(num_sms // s, 1))
        for s in range(least, least + MAX_EXTRA_SLICES)
    ]
    tiles = -(-tokens // TOKEN_TILE)
    rounds = [-(-tiles // (choice.groups * cta.warps)) for choice in choices]
    used = [c.slices * tiles / (turns * cta.warps * num_sms) for c, turns in zip(choices, rounds, strict=True)]
    chosen = next((c for c, u in zip(choices, used, strict=True) if u >= GOOD_USE), choices[used.index(max(used))])
    return chosen._replace(slices=-(-columns // chosen.slice_columns))


def exact_ring(n: int) -> tuple[int, int]:
    """Return two sizes of a warp's work if the weight is exact (float32): the number of its units of UNIT_TOKENS
    tokens, and the number of ring stages, each of which holds one unit.

    With 8 streams there is one unit, since its sums fill the registers, and there are two stages, since the weight's
    two steps fill shared memory.
    """
    return (2, 3) if n < 8 else (1, 2)


def exact_slices(
    cta: ProjectCta, n: int, itemsize: int, columns: int, tokens: int, num_sms: int
) -> Slices:  # fmt: skip
    """Divide the columns and tokens of the projection with a float32 weight (`project_exact.py`) over CTAs.

    The result has the fewest slices of columns with which nearly all SMs are busy to the end. There is one CTA for each
    pair of a slice and a group of tokens; a group has as many tokens as one CTA handles.

    columns: n C, the columns of n residual streams.
    """
    step = cta.step_bytes // itemsize
    groups, steps = -(-tokens // (cta.warps * UNIT_TOKENS * exact_ring(n)[0])), -(-columns // step)
    choices = range(1, min(steps, num_sms, MAX_EXACT_SLICES) + 1)
    used = [groups * s / (-(-groups * s // num_sms) * num_sms) for s in choices]
    slices = next((s for s, u in zip(choices, used, strict=True) if u >= GOOD_USE), choices[used.index(max(used))])
    width = -(-steps // slices) * step
    return Slices(-(-columns // width), width, groups)


def project_workspace(n: int, slices: int, tokens: int) -> int:
    """Return the size of the projection's workspace in float32 elements. Each slice of x's columns stores, for each
    token, K = n^2 + 2n sums of products and one sum of squares."""
    return slices * tokens * (outputs(n) + 1)


def thread_columns(n: int, itemsize: int) -> int:
    """Return how many columns a thread has in the projection's backward. It is 8 for 16-bit streams, and 4 for float32
    streams or 8 streams, whose sums of 8 columns would not fit into registers."""
    return 8 if itemsize == 2 and n < 8 else 4


def row_vectors(n: int) -> int:
    """Return how many vectors of a token's row (8 columns each) a warp of the projection's backward handles, for 16-bit
    streams."""
    return thread_columns(n, 2)


def block_bytes(n: int, parts: Any) -> Any:
    """Return the bytes that the projection's backward of 16-bit streams reads for each token tile besides x: the tile's
    block.

    A block begins with dp, the gradient of p = x weight^T, in sub-blocks of 8 tokens x 8 outputs; the two sub-blocks of
    the tile's 16 tokens for the same outputs are neighbours. With a float32 weight, dp is stored twice: first the
    nearest 16-bit numbers, then their rests (`split.py`). A block ends with each token's float32 factor f, where f x is
    a term of d_x.

    parts: 16-bit numbers that represent an element of dp: 1, or 2 with a float32 weight.
    """
    return TOKEN_TILE * (2 * outputs(n) * parts + 4)


def spread_blocks(n: int, itemsize: int, width: Any) -> Any:
    """Return the number of CTAs of the projection's backward that together have a token's n C columns.

    width: C (columns of one stream), a Python integer or the compiler's.
    """
    columns = 8 * thread_columns(n, itemsize)
    return ((width + columns - 1) // columns * n + SPREAD_WARPS - 1) // SPREAD_WARPS


def spread_splits(n: int, itemsize: int, width: int, tokens: int, num_sms: int, is_exact: bool) -> int:
    """Return the number of parts into which the projection's backward divides the tokens. It is chosen so that the last
    wave of CTAs is nearly full.

    is_exact: True: the weight is float32; then a part has at most MOST_EXACT_TOKENS tokens.
    """
    blocks, slots = spread_blocks(n, itemsize, width), SPREAD_CTAS_PER_SM * num_sms
    least = max(1, -(-tokens // MOST_EXACT_TOKENS)) if is_exact else 1
    most = max(least, min(MAX_SPLITS, -(-tokens // TOKEN_TILE)))
    use = [blocks * s / (-(-blocks * s // slots) * slots) for s in range(least, most + 1)]
    return least + next((i for i, u in enumerate(use) if u >= GOOD_USE), use.index(max(use)))


def gate_ctas(tokens: int, num_sms: int) -> int:
    """Return the number of CTAs of the gates' backward: enough for one batch of tokens for each warp, but at most as
    many as run on the SMs at the same time. With more tokens, a warp has several batches."""
    return min(-(-tokens // (GATE_BATCH * GATE_BACKWARD_WARPS)), GATE_CTAS_PER_SM * num_sms)


class BackwardWorkspace(NamedTuple):
    """Offsets in bytes of the arrays in the workspace of the projection's backward.

    The projection is p = x weight^T, where x is [T, n C] and p is [T, K] with K = n^2 + 2n. Here T is rounded up to
    whole token tiles.

    The arrays products, pairs and norms are for float32 streams. 16-bit streams have one block for each token tile
    instead (`block_bytes`), with the same content; the blocks begin at `products`.

    Attributes:
        products: dp, the gradient of p, [T, K] in the streams' dtype.
        pairs: dp as [T / 2, K, 2], an output's values for two tokens side by side.
        norms: float32 [T], each token's factor f: the RMS norm of x adds f x to d_x, the gradient of x.
        sums: float32 [CTAs, 2 K], the sums over tokens that each CTA of the gates' backward stores, for the gradients
            of the gates' bias and alphas (gates.py).
        weights: float32, the sums for d_weight over each part of the tokens (`spread_splits`): [parts, K, n C], or for
            16-bit streams in the order of `tile_sums.py`.
        end: the size of the workspace.
    """

    products: Any
    pairs: Any
    norms: Any
    sums: Any
    weights: Any
    end: Any


def backward_workspace(n: int, itemsize: int, width: Any, tokens: Any, ctas: Any, splits: Any) -> BackwardWorkspace:
    """Return the offsets of the arrays in the workspace of the projection's backward, and its size.

    Every array begins at a multiple of 16 bytes. Sizes are Python integers or the compiler's.

    Args:
        width: C, columns of one stream.
        ctas: number of CTAs of the gates' backward (`gate_ctas`).
        splits: number of parts into which the tokens are divided (`spread_splits`).
    """
    rows = (tokens + TOKEN_TILE - 1) // TOKEN_TILE * TOKEN_TILE
    pairs = rows * (outputs(n) * itemsize)
    norms = 2 * pairs
    sums = norms + rows * 4
    weights = sums + ctas * (4 * 2 * outputs(n))
    # Columns of all warps, including warps past the last column.
    columns = spread_blocks(n, itemsize, width) * (SPREAD_WARPS * 8 * thread_columns(n, itemsize))
    end = weights + splits * (columns * (4 * outputs(n)))
    return BackwardWorkspace(rows * 0, pairs, norms, sums, weights, end)
