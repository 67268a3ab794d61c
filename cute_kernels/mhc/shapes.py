"""Sizes that the host's workspaces and the kernels must agree on. Plain Python: imports no compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..architectures import ARCHS

CTAS_PER_SM = 4
"""Of post_mix's backward: of 128 threads with up to 128 registers each. Every CTA leaves a row of partial sums."""

TOKEN_TILE = 16
# Rows of the weight in shared memory lie 64 bytes further apart than a multiple of 128: then the 16-byte reads of 8
# lanes (2 rows, 4 vectors each) fall on all banks.
ROW_PADDING = 64
GOOD_USE = 0.95
MAX_EXTRA_SLICES = 5
# With an exact weight: tokens of a warp that are copied, and multiplied, at a time.
UNIT_TOKENS = 32
MAX_EXACT_SLICES = 48  # more take longer to add up than they save of few tokens

# Its backward.
GATE_WARPS = 8
GATE_BATCH = 8
"""Tokens that a warp of the gates' backward has at a time: of 4 streams 50 KB an SM are then under way."""
GATE_BACKWARD_WARPS = 16
GATE_CTAS_PER_SM = 2
SPREAD_WARPS = 4
SPREAD_CTAS_PER_SM = 3
MAX_SPLITS = 16
MOST_EXACT_TOKENS = 8192
"""Of a part, with a float32 weight: the tensor cores cut off what their sums do not hold, for 4681 tokens 1e-5 of them,
and more for more."""


class ProjectCta(NamedTuple):
    """A CTA of the projection. Shared memory, `smem` bytes: a ring of stages of x for each of its `warps`, then a slice
    of the weight. A warp reads `step_bytes` of each token of a tile at a time.
    """

    warps: int
    smem: int
    step_bytes: int

    @property
    def stage_bytes(self) -> int:
        return TOKEN_TILE * self.step_bytes


def project_cta(arch: str) -> ProjectCta:
    """On Hopper 64 KB of x are under way. A CTA of 99 KB has a quarter of that, read by half as many warps in rows half
    as long, so that 8 streams' float32 weight fits beside it."""
    smem = ARCHS[arch].smem_bytes - 1024
    return ProjectCta(8, smem, 256) if smem > 128 * 1024 else ProjectCta(4, smem, 128)


def outputs(n: int) -> int:
    """Rows of the projection's weight: h_pre, h_post and h_res."""
    return n * n + 2 * n


def ring_stages(n: int) -> int:
    """Of x, for a warp: two are under way while the third is used. 8 streams' weight leaves room for two."""
    return 3 if n < 8 else 2


def slice_capacity(cta: ProjectCta, n: int, itemsize: int) -> int:
    """Columns of a weight slice that fit shared memory, in whole steps."""
    ring = cta.warps * ring_stages(n) * cta.stage_bytes
    row = (cta.smem - ring) // outputs(n) - ROW_PADDING
    return row // cta.step_bytes * (cta.step_bytes // itemsize)


class Slices(NamedTuple):
    """How the projection cuts its columns: slices of `slice_columns` each, for `groups` CTAs that share the tokens."""

    slices: int
    slice_columns: int
    groups: int


def project_slices(
    cta: ProjectCta, n: int, itemsize: int, columns: int, tokens: int, num_sms: int
) -> Slices:  # fmt: skip
    """As few slices as keep nearly all warps of all SMs busy to the end: each slice writes sums for every token."""
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
    """With an exact weight, units of tokens to a warp, and stages of a unit each in its ring. 8 streams' sums leave
    registers for one unit, and the weight's two steps room for two stages.
    """
    return (2, 3) if n < 8 else (1, 2)


def exact_slices(
    cta: ProjectCta, n: int, itemsize: int, columns: int, tokens: int, num_sms: int
) -> Slices:  # fmt: skip
    """As few slices as keep nearly all SMs busy to the end, with a CTA for each slice of each group of tokens."""
    step = cta.step_bytes // itemsize
    groups, steps = -(-tokens // (cta.warps * UNIT_TOKENS * exact_ring(n)[0])), -(-columns // step)
    choices = range(1, min(steps, num_sms, MAX_EXACT_SLICES) + 1)
    used = [groups * s / (-(-groups * s // num_sms) * num_sms) for s in choices]
    slices = next((s for s, u in zip(choices, used, strict=True) if u >= GOOD_USE), choices[used.index(max(used))])
    width = -(-steps // slices) * step
    return Slices(-(-columns // width), width, groups)


def project_workspace(n: int, slices: int, tokens: int) -> int:
    """float32 elements: a token's sums of products and sum of squares for each slice."""
    return slices * tokens * (outputs(n) + 1)


def thread_columns(n: int, itemsize: int) -> int:
    """Columns of a thread in the projection's backward: a vector, or half of one where sums would not fit registers."""
    return 8 if itemsize == 2 and n < 8 else 4


def row_vectors(n: int) -> int:
    """Vectors of a token's row that a warp of the backward has, of 16-bit streams."""
    return thread_columns(n, 2)


def block_bytes(n: int, parts: Any) -> Any:
    """What the backward needs of a token tile of 16-bit streams besides x: dp in blocks of 8 tokens x 8 outputs, two of
    each 8 outputs side by side; where dp has two parts, blocks of the second; then the factors of x, float32.
    """
    return TOKEN_TILE * (2 * outputs(n) * parts + 4)


def spread_blocks(n: int, itemsize: int, width: Any) -> Any:
    """CTAs of the backward that share a token's columns; `width` may be the compiler's."""
    columns = 8 * thread_columns(n, itemsize)
    return ((width + columns - 1) // columns * n + SPREAD_WARPS - 1) // SPREAD_WARPS


def spread_splits(n: int, itemsize: int, width: int, tokens: int, num_sms: int, is_exact: bool) -> int:
    """Parts that the tokens are cut into, so that the last wave of CTAs is nearly full."""
    blocks, slots = spread_blocks(n, itemsize, width), SPREAD_CTAS_PER_SM * num_sms
    least = max(1, -(-tokens // MOST_EXACT_TOKENS)) if is_exact else 1
    most = max(least, min(MAX_SPLITS, -(-tokens // TOKEN_TILE)))
    use = [blocks * s / (-(-blocks * s // slots) * slots) for s in range(least, most + 1)]
    return least + next((i for i, u in enumerate(use) if u >= GOOD_USE), use.index(max(use)))


def gate_ctas(tokens: int, num_sms: int) -> int:
    """Of the gates' backward: a batch of tokens to a warp, or several where the SMs are full."""
    return min(-(-tokens // (GATE_BATCH * GATE_BACKWARD_WARPS)), GATE_CTAS_PER_SM * num_sms)


class BackwardWorkspace(NamedTuple):
    """Where the parts of the backward's workspace begin, in bytes, and its end. T is padded to whole token tiles.

    products: the gradient of x weight^T, [T, K] in the streams' dtype. pairs: the same as [T / 2, K, 2], a column's two
    tokens side by side. norms: float32 [T], the factor of x in its gradient. 16-bit streams have blocks in place of
    these three, of up to two parts (`block_bytes`). sums: float32 [gate CTAs, 2 K].
    weights: float32, d_weight's sums of each split, [K, nC], or of 16-bit streams as `tile_sums.py` has them.
    """

    products: Any
    pairs: Any
    norms: Any
    sums: Any
    weights: Any
    end: Any


def backward_workspace(n: int, itemsize: int, width: Any, tokens: Any, ctas: Any, splits: Any) -> BackwardWorkspace:
    """Of Python integers or of the compiler's; every part begins at a multiple of 16 bytes."""
    rows = (tokens + TOKEN_TILE - 1) // TOKEN_TILE * TOKEN_TILE
    pairs = rows * (outputs(n) * itemsize)
    norms = 2 * pairs
    sums = norms + rows * 4
    weights = sums + ctas * (4 * 2 * outputs(n))
    # Columns of all warps, also those behind the last.
    columns = spread_blocks(n, itemsize, width) * (SPREAD_WARPS * 8 * thread_columns(n, itemsize))
    end = weights + splits * (columns * (4 * outputs(n)))
    return BackwardWorkspace(rows * 0, pairs, norms, sums, weights, end)
