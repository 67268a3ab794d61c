"""Choice of a token's experts, and of the weights of these experts. The experts are the k with the largest logits. A
warp handles a token.

A lane holds every 32nd logit, as an integer key that has the same order as the number (largest.py). Each of k rounds
finds the warp's largest key by two warp reductions and removes it; lane r keeps the result of round r. Instructions
bound the time, not bytes: 8 of 128 experts for 32768 tokens take 28 us on an H200, whose memory reads the logits in 4
us.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.vectors import load_params
from ..device.warps import WARP
from ..specs import PARAM_FORMS
from .largest import ABSENT, key_of, largest, number_of, place_of, sum_of_two_largest

SOFTMAX, SIGMOID = 0, 1
"""Values of `Rule.score`, the function that turns logits into weights. With `Rule.normalize`, softmax is computed over
the k chosen logits alone. The result is the same as softmax over all logits, divided by the sum of the chosen
weights."""
LOWEST = -3.4e38
TINY = 1e-20
"""Added to the sum of sigmoids before weights are divided by this sum, as in DeepSeek-V3."""


class Logits(NamedTuple):
    """The logits [N, E] of all tokens.

    Attributes:
        address: the address of the logits.
        code: the dtype of the logits, a number of PARAM_FORMS.
        experts: E.
        bias: the address of float32 [E]; 0: no bias. It is added to the scores by which experts are chosen, but not to
            weights.
    """

    address: Int64
    code: Int32
    experts: Int32
    bias: Int64


class Rule(NamedTuple):
    """The rule by which a token's experts are chosen and weighted.

    Attributes:
        k: number of experts to choose.
        score: SOFTMAX or SIGMOID.
        normalize: 1: weights are divided by their sum; 0: they are not.
        num_groups: number of groups, at most 32, into which experts are split. A group is a range of experts; all have
            the same size.
        top_groups: number of groups from which experts are chosen. A group's rank is the sum of its two largest scores
            (with bias).
        scale: a factor of all weights.
    """

    k: Int32
    score: Int32
    normalize: Int32
    num_groups: Int32
    top_groups: Int32
    scale: Float32


class Softmax(NamedTuple):
    """Two numbers that define the softmax over all of a token's experts: exp(logit - top) / total.

    Attributes:
        top: the largest logit.
        total: the sum of exp(logit - top).
    """

    top: Float32
    total: Float32


def sigmoid(logit: Float32) -> Float32:
    """Return 1 / (1 + exp(-logit))."""
    return 1.0 / (1.0 + cute.math.exp(-logit))


class Chooser(Invariant):
    """Chooser of experts, one token a warp.

    capacity: the most experts among which it can choose, a multiple of 32.
    """

    def __init__(self, logits: Logits, rule: Rule, capacity: int):
        self.logits = logits
        self.rule = rule
        self.count = capacity // WARP

    @cute.jit
    def choose(self, token: Int32) -> tuple[Int32, Float32]:
        """Choose a token's experts. Lane r < k returns the r-th expert and its weight; other lanes return -1 and 0."""
        rule = self.rule
        keys = cute.make_rmem_tensor(self.count, Int32)
        everything = self._rank(token, keys)
        if rule.num_groups > 1:
            self._limit(keys)
        lane = cute.arch.lane_idx()
        expert = Int32(-1)
        for r in cutlass.range(rule.k, unroll=1):
            _, place = largest([keys[i] for i in range(self.count)])
            for i in cutlass.range_constexpr(self.count):
                keys[i] = select(place - lane == WARP * i, Int32(ABSENT), keys[i])
            expert = select(lane == r, place, expert)
        return expert, self._weight(token, expert, everything)

    @cute.jit
    def _rank(self, token: Int32, keys: cute.Tensor) -> Softmax:
        """Compute the keys by which a token's experts are chosen. Keys are integers that have the same order as the
        numbers.

        Returns the softmax over all experts if weights need it, else (0, 1).

        keys: filled with the keys of scores with bias, or with the keys of logits if these give the same order.
        """
        self._load(token, keys)
        top = Float32(0.0)
        total = Float32(1.0)
        if (self.rule.score == SOFTMAX) & (self.rule.normalize == 0):
            key, _ = largest([keys[i] for i in range(self.count)])
            top = number_of(key)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.count):
                part = cute.math.exp(number_of(keys[i]) - top)
                total += select(keys[i] != ABSENT, part, Float32(0.0))
            total = cute.arch.warp_reduction_sum(total)
        if (self.rule.score == SIGMOID) | (self.logits.bias != 0):
            for i in cutlass.range_constexpr(self.count):
                by = number_of(keys[i])
                if self.rule.score == SIGMOID:
                    by = sigmoid(by)
                if self.logits.bias != 0:
                    by += vector_at(Float32, self.logits.bias)[cutlass.min(place_of(i), self.logits.experts - 1)]
                keys[i] = select(keys[i] != ABSENT, key_of(by), Int32(ABSENT))
        return Softmax(top, total)

    @cute.jit
    def _load(self, token: Int32, keys: cute.Tensor):
        """Load this lane's logits of a token, and store their keys in `keys`. Keys past the last expert are ABSENT."""
        if self.logits.code == PARAM_FORMS["bfloat16"]:
            self._load_as(BFloat16, token, keys)
        elif self.logits.code == PARAM_FORMS["float16"]:
            self._load_as(Float16, token, keys)
        else:
            self._load_as(Float32, token, keys)

    def _load_as(self, dtype: type[cutlass.Numeric], token: Int32, keys: cute.Tensor) -> None:
        experts = self.logits.experts
        row = vector_at(dtype, self.logits.address + Int64(token) * experts * (dtype.width // 8))
        raw = [row[cutlass.min(place_of(i), experts - 1)] for i in range(self.count)]  # all loads are issued at once
        for i, one in enumerate(raw):
            keys[i] = select(place_of(i) < experts, key_of(one.to(Float32)), Int32(ABSENT))

    @cute.jit
    def _limit(self, keys: cute.Tensor):
        """Keep only the experts of the best `top_groups` groups: set the keys of all other experts to ABSENT, so that
        none of them is chosen."""
        size = self.logits.experts // self.rule.num_groups
        lane = cute.arch.lane_idx()
        best = Int32(ABSENT)
        for g in cutlass.range(self.rule.num_groups, unroll=1):
            begin = g * size - lane
            first, second = Int32(ABSENT), Int32(ABSENT)
            for i in cutlass.range_constexpr(self.count):
                is_inside = (begin <= WARP * i) & (WARP * i < begin + size)
                key = select(is_inside, keys[i], Int32(ABSENT))
                second = cutlass.max(second, cutlass.min(first, key))
                first = cutlass.max(first, key)
            total = sum_of_two_largest(first, second)
            best = select(lane == g, key_of(total), best)
        taken = Int32(0)
        for _ in cutlass.range(self.rule.top_groups, unroll=1):
            _, group = largest([best])
            taken |= Int32(1) << group
            best = select(lane == group, Int32(ABSENT), best)
        for g in cutlass.range(self.rule.num_groups, unroll=1):
            begin = select((taken >> g) & 1 != 0, self.logits.experts, g * size) - lane
            for i in cutlass.range_constexpr(self.count):
                keys[i] = select((begin <= WARP * i) & (WARP * i < begin + size), Int32(ABSENT), keys[i])

    @cute.jit
    def _weight(self, token: Int32, expert: Int32, everything: Softmax) -> Float32:
        """Return the weight of this lane's expert; 0 if `expert` is -1.

        Args:
            token: the token's index.
            expert: the expert's index; -1: none.
            everything: the softmax over all of the token's experts, which `_rank` returned.
        """
        rule = self.rule
        has_one = expert >= 0
        first = Int64(token) * self.logits.experts
        value = load_params(self.logits.address, self.logits.code, first + cutlass.max(expert, Int32(0)), 1)[0]
        rest = Float32(0.0)
        if rule.score == SOFTMAX:
            top = everything.top
            if rule.normalize != 0:
                top = cute.arch.warp_reduction_max(select(has_one, value, Float32(LOWEST)))
            value = cute.math.exp(value - top)
        else:
            value = sigmoid(value)
            rest = Float32(TINY)
        weight = select(has_one, value, Float32(0.0))
        total = everything.total
        if rule.normalize != 0:
            total = cute.arch.warp_reduction_sum(weight) + rest
        return weight / total * rule.scale
