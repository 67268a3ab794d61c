"""Steps that Humming leaves to engines, in Triton: blocks of rows of one expert, weighted sums of a token's rows.

Each step is one kernel, which reads a routing made by `glulam.Routing.from_topk`. vLLM needs at least as many launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

import glulam

COLUMNS = 1024  # columns of a program of _sum


@triton.jit  # type: ignore[untyped-decorator]
def _align(  # type: ignore[no-untyped-def]
    offs, token_of_row, ids, sorted_ids, expert_ids, total, num_choices, num_experts,
    K: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write one block of rows of one expert in each program (see `align`).

    MOST, EXPERTS: the powers of two at or above BLOCK and num_experts.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    end = tl.load(offs + expert, mask=is_expert, other=0)
    begin = tl.load(offs + expert - 1, mask=is_expert & (expert > 0), other=0)
    blocks = tl.where(is_expert, (end - begin + BLOCK - 1) // BLOCK, 0)
    last = tl.cumsum(blocks, 0)
    if block == 0:
        tl.store(total, tl.sum(blocks) * BLOCK)
    this = tl.sum((last <= block).to(tl.int32))
    if this < num_experts:
        place = tl.arange(0, MOST)
        first = tl.sum(tl.where(expert == this, begin + (block - (last - blocks)) * BLOCK, 0))
        row = first + place
        has_row = (row < tl.sum(tl.where(expert == this, end, 0))) & (place < BLOCK)
        token = tl.load(token_of_row + row, mask=has_row, other=0)
        choice = tl.full([MOST], 0, tl.int32) + num_choices
        for k in tl.static_range(K):
            chosen = tl.load(ids + token * K + k, mask=has_row, other=-1)
            choice = tl.where(chosen == this, token * K + k, choice)
        tl.store(expert_ids + block, this)
        tl.store(sorted_ids + block * BLOCK + place, choice, mask=place < BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(y, places, weights, out, hidden, K: tl.constexpr, BY_CHOICE: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write COLUMNS columns of a token's weighted sum in each program.

    `places` [N, K] has the row of each choice in y; a choice with a negative number adds nothing. BY_CHOICE: the row of
    choice k of token n is n K + k instead.
    """
    token, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k)
        weight = tl.load(weights + token * K + k)
        row = place
        if BY_CHOICE:
            row = token * K + k
        there = (column < hidden) & (place >= 0)
        sums += weight * tl.load(y + row.to(tl.int64) * hidden + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * hidden + column, sums.to(out.dtype.element_ty), mask=column < hidden)


def align(routing: glulam.Routing, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad each expert's rows to blocks of `block` rows, so that a block has one expert, as indexed GEMMs read them.

    Returns:
        (choices [blocks * block], experts [blocks], number of rows with padding [1]), all int32. A choice is the number
        n K + k, or N K if the row is padding. Entries after the last block are not written.
    """
    ids = routing.ids
    choices, experts = ids.numel(), routing.num_experts
    most = triton.cdiv(choices, block) + min(choices, experts)
    sorted_ids, expert_ids, total = ids.new_empty(most * block), ids.new_empty(most), ids.new_empty(1)
    _align[(most,)](
        routing.offs, routing.token_of_row, ids, sorted_ids, expert_ids, total, choices, experts, K=ids.shape[1],
        BLOCK=block, MOST=triton.next_power_of_2(block), EXPERTS=triton.next_power_of_2(experts),
    )  # fmt: skip
    return sorted_ids, expert_ids, total


def weighted_sums(y: Tensor, places: Tensor, weights: Tensor, out: Tensor, *, by_choice: bool) -> Tensor:
    """Sum each token's rows of y, times their weights, into out [N, H]; return out.

    Args:
        y: rows [N K, H].
        places: int32 [N, K], the row of each choice; negative: the choice has no row.
        weights: [N, K].
        out: buffer for the result.
        by_choice: True: the row of choice k of token n is n K + k, and `places` only says whether there is a row.
    """
    grid = (len(places), triton.cdiv(y.shape[1], COLUMNS))
    _sum[grid](y, places, weights, out, y.shape[1], K=places.shape[1], BY_CHOICE=by_choice, COLUMNS=COLUMNS)
    return out
