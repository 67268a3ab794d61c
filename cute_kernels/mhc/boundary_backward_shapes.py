"""Sizes of the boundary's backward, on which the host (workspaces, launch arguments) and the kernels must agree. Plain
Python: imports no compiler.

T tokens have n residual streams of D columns and K = n^2 + 2n coefficients each: comb [n, n], post [n] and pre [n]. dp
is the gradient of the projection p, K numbers a token. The first kernel makes dp and a record for each token
(`boundary_tokens.py`); the main kernel (`boundary_backward.py`) reads these and the streams. A slice is a range of the
D columns, a part (of the tokens) a range of token tiles. Sizes are Python integers or the compiler's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .boundary_shapes import ITEMSIZE, SliceCta, first_that_fits, parts_of, slices_of, tiles_of
from .shapes import TOKEN_TILE, outputs

TOKEN_WARPS = 2
TOKENS_OF_A_WARP = 2
TOKEN_CTAS_PER_SM = 6
MOST_PARTS = 16
MOST_TILES = 512
"""The most token tiles in one part of the tokens. Tensor cores truncate their sums: a sum over 4681 tokens loses 1e-5
of its value, and more over more tokens."""
CHOICES = (SliceCta(8, 3), SliceCta(4, 2))
"""Sizes of a CTA, the best first."""
WARPS_PER_SM = 8


def coefficient_floats(n: int) -> int:
    """Return the number of float32 numbers in a token's record, which the first kernel makes for the main kernel.

    A record has the coefficients comb (n^2 numbers), post (n) and pre (n), then the token's r, factor and f (formulas
    in `boundary_tokens.py`), then one number of padding, so that it fills whole vectors of 16 bytes.
    """
    return outputs(n) + 4


def dp_bytes(n: int) -> int:
    """Return the bytes of a token tile's dp with one 16-bit number for each element.

    dp is stored twice in this size: once each element's nearest 16-bit number, once its rest (`split.py`).
    """
    return TOKEN_TILE * outputs(n) * ITEMSIZE


def block_bytes(n: int) -> int:
    """Return the bytes that the first kernel stores for each token tile. A tile's block has dp in two copies, as
    nearest numbers and as rests, each in sub-blocks of 8 tokens x 8 outputs (`dp_blocks.py`). A record for each token
    follows (`coefficient_floats`)."""
    return 2 * dp_bytes(n) + TOKEN_TILE * coefficient_floats(n) * 4


def smem_bytes(n: int, cta: SliceCta) -> int:
    """Return a CTA's bytes of shared memory for the main kernel.

    Each stage of the ring holds n streams, n gradients of the updated streams, y and d_x, then the block that the first
    kernel stored. After the stages come the n updated streams, then the results before they are stored: n d_streams and
    d_y.
    """
    return cta.stages * (2 * (n + 1) * cta.array_bytes + block_bytes(n)) + (2 * n + 1) * cta.array_bytes


def slice_cta(n: int, room: int) -> SliceCta:
    """Return the best sizes of the main kernel's CTA that fit into `room` bytes of shared memory."""
    return first_that_fits(CHOICES, lambda cta: smem_bytes(n, cta), room)


class BackwardCut(NamedTuple):
    """Division of the tokens over the CTAs of the boundary's backward.

    Attributes:
        token_ctas: number of CTAs of the first kernel, which share the tokens.
        parts: number of parts of the tokens in the main kernel. The kernel has a CTA for each pair of a part and a
            slice of the columns; the CTA stores sums over the part for the parameters' gradients.
    """

    token_ctas: int
    parts: int


def backward_cut(cta: SliceCta, width: int, tokens: int, num_sms: int) -> BackwardCut:
    """Return the division of the tokens with which the main kernel takes the least time, by the model of `parts_of`.

    Args:
        cta: sizes of the main kernel's CTA.
        width: D.
    """
    slices, tiles, slots = slices_of(cta, width), tiles_of(tokens), num_sms * WARPS_PER_SM // cta.warps
    parts = parts_of(slices, tiles, slots, max(1, -(-tiles // MOST_TILES)), MOST_PARTS)
    of_tokens = -(-tokens // (TOKEN_WARPS * TOKENS_OF_A_WARP))
    return BackwardCut(min(of_tokens, TOKEN_CTAS_PER_SM * num_sms), parts)


class BackwardWorkspace(NamedTuple):
    """Offsets in bytes of the arrays in the workspace of the boundary's backward.

    There are T tokens with K = n^2 + 2n coefficients each. A CTA of the main kernel has one of `slices` slices of the
    columns and one of `parts` parts of the tokens.

    Attributes:
        blocks: for each token tile the block of `block_bytes` bytes that the first kernel stores.
        rows: float32 [token_ctas, 2 K], each first-kernel CTA's sums over tokens for the gradients of base and scale,
            the parameters of the gates.
        dots: float32 [slices, T, K], for each slice the sums over its columns for the gradients of comb, post and pre.
        weights: float32 [parts, slices, ...], each CTA's sums over tokens for the weight's gradient, in the order in
            which registers hold them.
        norms: float32 [parts, slices, columns of a slice], each CTA's sums over tokens for norm_weight's gradient.
        end: the size of the workspace.
    """

    blocks: Any
    rows: Any
    dots: Any
    weights: Any
    norms: Any
    end: Any


def backward_workspace(
    n: int, cta: SliceCta, width: Any, tokens: Any, token_ctas: Any, parts: Any
) -> BackwardWorkspace:  # fmt: skip
    """Return the offsets of the workspace's arrays, and the workspace's size. Every array begins at a multiple of 16
    bytes.

    Args:
        cta: sizes of the main kernel's CTA.
        width: D.
        token_ctas: number of CTAs of the first kernel.
        parts: number of parts of the tokens in the main kernel.
    """
    slices = slices_of(cta, width)
    rows = tiles_of(tokens) * block_bytes(n)
    dots = rows + token_ctas * (2 * outputs(n) * 4)
    weights = dots + slices * tokens * (outputs(n) * 4)
    norms = weights + parts * slices * (cta.columns * n * outputs(n) * 4)
    return BackwardWorkspace(tokens * 0, rows, dots, weights, norms, norms + parts * slices * (cta.columns * 4))
