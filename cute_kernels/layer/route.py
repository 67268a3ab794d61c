"""Routing kernels: from logits, or from ids that another router chose, to the rows of experts.

    choose   makes ids and weights from logits; if there is a single chunk also the rows, else each chunk's counts
             (for few tokens, the same call can make the logits before, with the kernel of logits.py)
    count    makes each chunk's counts from ids
    place    makes the rows from ids and counts

A chunk is the consecutive tokens of one CTA of 32 warps. Its counts say how often it chose each expert (placing.py). A
single chunk needs no other CTA's counts. So few tokens take one launch of one CTA, and more tokens take two launches.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, let_next_begin, wait_for_earlier
from ..device.warps import WARP
from ..specs import PARAM_FORMS, LayerSpec
from ..tracing import Traced, traced
from .choice import Chooser, Logits, Rule
from .placing import THREADS, WARPS, Choices, Placer, Results, token_limit, unmapped


class _Chunks(Invariant):
    """Base of routing kernels, in which each CTA handles one chunk of consecutive tokens."""

    def __init__(self, spec: LayerSpec):
        self.name = spec.name
        self.capacity = spec.experts

    kernel: Any

    def _launch(self, arguments: tuple, tokens: Int32, chunk: Int32, stream: cuda.CUstream, position: Int32) -> None:
        name_kernel(self.kernel, self.name)
        self.kernel(*arguments, tokens, chunk).launch(
            grid=(cute.ceil_div(tokens, chunk), 1, 1),
            block=(THREADS, 1, 1),
            smem=Placer.num_bytes(self.capacity),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=early(Int32(position > 0)),
        )

    def _placer(self, choices: Choices, tokens: Int32, chunk: Int32) -> Placer:
        block, _, _ = cute.arch.block_idx()
        end = cutlass.min((block + 1) * chunk, tokens)
        return Placer(choices, block * chunk * choices.k, end * choices.k, self.capacity)


class Choose(_Chunks):
    """Kernel that chooses each token's experts and weights from its logits.

    workspace: the address of all chunks' counts; 0: there is only one chunk, and this kernel also places the chunk's
    choices in rows.
    """

    @cute.jit
    def __call__(
        self, logits: Int64, bias: Int64, num_tokens: Int64, ids: Int64, weights: Int64, offs: Int64,
        token_of_row: Int64, row_of: Int64, weight_of_row: Int64, workspace: Int64, forms: Int32, tokens: Int32,
        experts: Int32, k: Int32, score: Int32, normalize: Int32, num_groups: Int32, top_groups: Int32, chunk: Int32,
        position: Int32, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            rule = Rule(k, score, normalize, num_groups, top_groups, scale)
            results = Results(weights, Int32(PARAM_FORMS["float32"]), offs, token_of_row, row_of, weight_of_row)
            arguments = (Logits(logits, forms, experts, bias), rule, num_tokens, ids, results, workspace)
            self._launch(arguments, tokens, chunk, stream, position)

    @cute.kernel
    def kernel(
        self, logits: Logits, rule: Rule, num_tokens: Int64, ids: Int64, results: Results, workspace: Int64,
        tokens: Int32, chunk: Int32,
    ):  # fmt: skip
        let_next_begin()
        wait_for_earlier()
        block, _, _ = cute.arch.block_idx()
        limit = token_limit(num_tokens, tokens)
        chooser = Chooser(logits, rule, self.capacity)
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        end = cutlass.min((block + 1) * chunk, tokens)
        for token in cutlass.range(block * chunk + thread // WARP, end, WARPS, unroll=1):
            expert = Int32(-1)
            weight = Float32(0.0)
            if token < limit:
                expert, weight = chooser.choose(token)
            if lane < rule.k:
                vector_at(Int32, ids)[token * rule.k + lane] = expert
                vector_at(Float32, results.weights)[token * rule.k + lane] = weight
        cute.arch.sync_threads()
        choices = unmapped(ids, logits.experts, rule.k, limit)
        placer = self._placer(choices, tokens, chunk)
        placer.count()
        if workspace != 0:
            placer.leave_counts(workspace, block)
        else:
            placer.place(results, workspace, block, Int32(1))


class Count(_Chunks):
    """Kernel that counts how often each chunk of tokens chose each expert. It writes the counts to `workspace`, int32
    [chunks, experts]."""

    @cute.jit
    def __call__(
        self, ids: Int64, num_tokens: Int64, expert_map: Int64, workspace: Int64, wide: Int32, first: Int32,
        num_mapped: Int32, tokens: Int32, experts: Int32, k: Int32, chunk: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            choices = Choices(ids, wide, first, expert_map, num_mapped, experts, k, Int32(0))
            self._launch((choices, num_tokens, workspace), tokens, chunk, stream, Int32(0))

    @cute.kernel
    def kernel(self, choices: Choices, num_tokens: Int64, workspace: Int64, tokens: Int32, chunk: Int32):
        let_next_begin()
        block, _, _ = cute.arch.block_idx()
        placer = self._placer(choices._replace(limit=token_limit(num_tokens, tokens)), tokens, chunk)
        placer.count()
        placer.leave_counts(workspace, block)


class Place(_Chunks):
    """Kernel that places choices: writes each choice's row, each row's token and weight, and the groups' ends.

    workspace: the address of all chunks' counts; 0: there is one chunk.
    """

    @cute.jit
    def __call__(
        self, ids: Int64, weights: Int64, num_tokens: Int64, expert_map: Int64, offs: Int64, token_of_row: Int64,
        row_of: Int64, weight_of_row: Int64, workspace: Int64, wide: Int32, weight_form: Int32, first: Int32,
        num_mapped: Int32, tokens: Int32, experts: Int32, k: Int32, chunk: Int32, position: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            choices = Choices(ids, wide, first, expert_map, num_mapped, experts, k, Int32(0))
            results = Results(weights, weight_form, offs, token_of_row, row_of, weight_of_row)
            self._launch((choices, num_tokens, results, workspace), tokens, chunk, stream, position)

    @cute.kernel
    def kernel(
        self, choices: Choices, num_tokens: Int64, results: Results, workspace: Int64, tokens: Int32, chunk: Int32
    ):  # fmt: skip
        let_next_begin()
        wait_for_earlier()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        placer = self._placer(choices._replace(limit=token_limit(num_tokens, tokens)), tokens, chunk)
        placer.count()
        placer.place(results, workspace, block, blocks)


KERNELS = {"choose": Choose, "count": Count, "place": Place}


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec))
