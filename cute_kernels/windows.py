"""The layout of the memory that ranks share. Each rank has a window, which has the same layout on all ranks. Among
other regions, a window has 64-bit words: messages from the other ranks, which say how far these are in a dispatch or
combine. Plain Python, used by the kernels and by the host, which allocates windows."""

from __future__ import annotations

REGIONS = ("rows", "scales", "ids", "weights", "sums", "weight_gradients", "words")
"""Regions of a window, for W ranks of at most L tokens each and K choices a token:

    rows              [W, L, H]     tokens, or gradients of results; first index: the rank that sent them. In MXFP8 an
                                    element is a byte, so tokens take only the first half of the region
    scales            [W, L, H/32]  bytes, the scales of tokens in MXFP8
    ids, weights      [W, L, K]     int32 expert and float32 weight of each choice, sent with tokens; ids are -1 after a
                                    rank's last token
    sums              [W, L, H]     partial results of this rank's tokens, or their gradients; first index: the rank
                                    that has the experts and sent them. Then one row of NaN
    weight_gradients  [W, L, K]     float32 gradients of weights, sent with gradients of tokens; then one NaN
    words             [WORDS, W]    messages of 64 bits, WORD_BYTES apart; last index: the rank that writes them
"""
WORDS = ("tokens", "sums", "enter", "abort")
"""Kinds of messages that a rank writes to the others:

    tokens    the sender's tokens have arrived
    sums      the sender's sums have arrived, and the sender no longer needs the tokens that were sent to it
    enter     the sender no longer needs anything that was sent to it before
    abort     the sender gave up; the word has the reason
"""
WORD_BYTES = 32
EPOCH_SHIFT, STATUS_SHIFT, COUNT_MASK = 24, 20, (1 << 20) - 1
"""Fields of a word, from the top: the operation's number in 40 bits, a status (an index of STATUSES) in 4 bits, a
number of tokens in 20 bits. Operations' numbers are compared by the sign of their difference, so that they may wrap."""
STATUSES = ("16-bit rows", "refused", "MXFP8 rows")
"""Statuses of a word of `tokens`. A status is the format of the sender's tokens, which must be the same on all ranks.
"refused": the sender refused its own tokens (its error says why) and sent none."""
MAX_TOKENS = COUNT_MASK

STATE = ("epoch", "last", "latest", "tickets", "error", "timeout", "mirror")
"""Fields of a rank's own state, int64 each:

    epoch     number of operations so far
    last      kind of the last operation, an index of LAST
    latest    number of the latest dispatch
    tickets   a counter by which a kernel finds out which of its CTAs is the last
    error     0, or the first error, from which `failure` reads the rank, the reason, the phase and the operation
    timeout   nanoseconds for which a kernel waits for another rank
    mirror    the address of host memory to which `error` is copied
"""
LAST = ("nothing", "dispatch", "combine", "combine of an older dispatch")
PHASES = ("dispatch", "combine")
REASONS = ("none", "late", "elsewhere", "refused", "other form")
"""Reasons of a failure, by their numbers in an error:

    late          a rank did not arrive in time
    elsewhere     a rank was in another operation
    refused       a rank's tokens did not fit
    other form    a rank's tokens are in 16 bits and this rank's in MXFP8, or the reverse
"""
SUSPECT_MASK, REASON_SHIFT, PHASE_SHIFT = 0xFF, 8, 16
"""Fields of an error and of an abort word, from the lowest: the suspect, which is the rank that the error blames (8
bits); an index of REASONS; an index of PHASES; and the operation's number, at EPOCH_SHIFT as in all words."""


def failure(error: int) -> tuple[int, str, str, int]:
    """Decode an error (`STATE`): return the rank that it blames, the reason, the phase and the operation's number."""
    reason, phase = REASONS[error >> REASON_SHIFT & 0xFF], PHASES[error >> PHASE_SHIFT & 0xF]
    return error & SUSPECT_MASK, reason, phase, error >> EPOCH_SHIFT & (1 << 40) - 1
