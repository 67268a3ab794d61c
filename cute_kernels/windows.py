"""What ranks that reach each other's memory share: a window each, laid out alike, and words in it by which they tell
each other how far they are. Plain Python, for the kernels and for the host that lays windows out.
"""

from __future__ import annotations

REGIONS = ("rows", "scales", "ids", "weights", "sums", "weight_gradients", "words")
"""Of a window of W ranks, at most L tokens each, K choices a token:

    rows              [W, L, H]     tokens, or gradients of results, by the rank that they come from; tokens in MXFP8
                                    have bytes, H a row, in the first half
    scales            [W, L, H/32]  bytes, of tokens in MXFP8
    ids, weights      [W, L, K]     int32 and float32, beside tokens; ids are -1 behind a rank's last token
    sums              [W, L, H]     results, or gradients of tokens, by the rank of the experts; then a row of NaN
    weight_gradients  [W, L, K]     float32, beside gradients of tokens; then a NaN
    words             [WORDS, W]    of 64 bits, WORD_BYTES apart, by the rank that writes them
"""
WORDS = ("tokens", "sums", "enter", "abort")
"""What a rank says: its tokens are here; its sums are, and it needs no more what was sent to it; it needs nothing of
what came before; it gave up, and why.
"""
WORD_BYTES = 32
EPOCH_SHIFT, STATUS_SHIFT, COUNT_MASK = 24, 20, (1 << 20) - 1
"""A word: the number of the operation in 40 bits, a status in 4, of STATUSES, and a number of tokens in 20. Numbers of
operations are compared as signed differences, so that they may wrap.
"""
STATUSES = ("16-bit rows", "refused", "MXFP8 rows")
"""What a rank's tokens are. Those of all ranks must be the same."""
MAX_TOKENS = COUNT_MASK

STATE = ("epoch", "last", "latest", "tickets", "error", "timeout", "mirror")
"""Of a rank alone, int64: operations so far; what the last was, of LAST; the number of the latest dispatch; a counter
by which the CTAs of a kernel find who is last; 0 or what went wrong; nanoseconds to wait; where the host reads `error`.
"""
LAST = ("nothing", "dispatch", "combine", "combine of an older dispatch")
PHASES = ("dispatch", "combine")
REASONS = ("none", "late", "elsewhere", "refused", "other form")
"""late: a rank did not come in time; elsewhere: it was in another operation; refused: its tokens did not fit; other
form: its tokens are in 16 bits and those here in MXFP8, or the reverse.
"""
SUSPECT_MASK, REASON_SHIFT, PHASE_SHIFT = 0xFF, 8, 16
"""An error, and an abort word: the operation as in all words, the suspect's rank, a reason and a phase."""


def failure(error: int) -> tuple[int, str, str, int]:
    """Rank, reason, phase and number of the operation of an error."""
    reason, phase = REASONS[error >> REASON_SHIFT & 0xFF], PHASES[error >> PHASE_SHIFT & 0xF]
    return error & SUSPECT_MASK, reason, phase, error >> EPOCH_SHIFT & (1 << 40) - 1
