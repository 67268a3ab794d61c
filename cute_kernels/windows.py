"""Memory that ranks share: each rank has a window, with the same layout on all ranks, and words in it that tell other
ranks how far the operation is. Plain Python, for the kernels and for the host, which allocates windows.
"""

from __future__ import annotations

REGIONS = ("rows", "scales", "ids", "weights", "sums", "weight_gradients", "words")
"""Regions of a window, for W ranks of at most L tokens each and K choices a token:

    rows              [W, L, H]     tokens, or gradients of results, by the rank that they come from; tokens in MXFP8
                                    have bytes, H a row, in the first half
    scales            [W, L, H/32]  bytes, the scales of tokens in MXFP8
    ids, weights      [W, L, K]     int32 and float32, sent with tokens; ids are -1 after a rank's last token
    sums              [W, L, H]     results, or gradients of tokens, by the rank of the experts; then a row of NaN
    weight_gradients  [W, L, K]     float32, sent with gradients of tokens; then a NaN
    words             [WORDS, W]    words of 64 bits, WORD_BYTES apart, by the rank that writes them
"""
WORDS = ("tokens", "sums", "enter", "abort")
"""Messages of a rank. tokens: its tokens have arrived. sums: its sums have arrived, and it no longer needs the tokens
that were sent to it. enter: it needs nothing that was sent before. abort: it gave up, and why.
"""
WORD_BYTES = 32
EPOCH_SHIFT, STATUS_SHIFT, COUNT_MASK = 24, 20, (1 << 20) - 1
"""Parts of a word: the number of the operation in 40 bits, a status (of STATUSES) in 4 bits, and a number of tokens in
20 bits. Numbers of operations are compared as signed differences, so that they may wrap.
"""
STATUSES = ("16-bit rows", "refused", "MXFP8 rows")
"""Kinds of a rank's tokens; the tokens of all ranks must be of the same kind."""
MAX_TOKENS = COUNT_MASK

STATE = ("epoch", "last", "latest", "tickets", "error", "timeout", "mirror")
"""A rank's own state, int64. epoch: number of operations so far. last: the kind of the last one, of LAST. latest: the
number of the latest dispatch. tickets: a counter by which a kernel's last CTA is found. error: 0, or the first error.
timeout: nanoseconds to wait. mirror: the address where the host reads `error`.
"""
LAST = ("nothing", "dispatch", "combine", "combine of an older dispatch")
PHASES = ("dispatch", "combine")
REASONS = ("none", "late", "elsewhere", "refused", "other form")
"""Reasons of a failure. late: a rank did not arrive in time. elsewhere: a rank was in another operation. refused: a
rank's tokens did not fit. other form: its tokens are in 16 bits and this rank's in MXFP8, or the reverse.
"""
SUSPECT_MASK, REASON_SHIFT, PHASE_SHIFT = 0xFF, 8, 16
"""Parts of an error and of an abort word: the suspect's rank, a reason, a phase, and the operation as in all words."""


def failure(error: int) -> tuple[int, str, str, int]:
    """Return the suspect's rank, the reason, the phase and the operation's number from an error."""
    reason, phase = REASONS[error >> REASON_SHIFT & 0xFF], PHASES[error >> PHASE_SHIFT & 0xF]
    return error & SUSPECT_MASK, reason, phase, error >> EPOCH_SHIFT & (1 << 40) - 1
