"""The fake GPU's functions of a layer, such as route and combine; see `support.fake_gpu`.

Each takes addresses and numbers by name, reads memory by address and computes with the reference. If tokens are split
into chunks, `choose` and `count` write each chunk's counts to the workspace, and `place` checks that they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.signatures import PARAMS
from cute_kernels.specs import ACTIVATIONS, GATED, GLU_LAYOUTS, LayerSpec
from glulam.activations import packed
from glulam.layer import reference
from glulam.ops.gate import GateBackwardCall, GateCall

from . import fake_ranks, oracle
from .memory import dtype_in, memory, optional

F32, I32 = torch.float32, torch.int32


def _tensor(address: int, *shape: int, dtype: torch.dtype = I32) -> Tensor:
    return memory(address, *shape, dtype=dtype)


def _counts(ids: Tensor, at: Any) -> Tensor:
    """Return the number of choices of each expert in each chunk of tokens, [chunks, E]."""
    return torch.stack(
        [
            torch.bincount(part[(part >= 0) & (part < at.experts)].view(-1), minlength=at.experts)
            for part in ids.split(at.chunk)
        ]
    ).int()


def _ids(at: Any) -> Tensor:
    """Return the local expert numbers of all choices, [N, K]; -1 for padding tokens."""
    assert not (at.expert_map and at.first)
    ids = _tensor(at.ids, at.tokens, at.k, dtype=torch.int64 if at.wide else I32)
    ids = reference.placed(ids, optional(at.expert_map, at.num_mapped, dtype=I32), at.first)
    limit = optional(at.num_tokens, 1, dtype=I32)
    return ids if limit is None else ids.masked_fill(torch.arange(at.tokens).unsqueeze(1) >= limit, -1)


def _leave_rows(at: Any, made: Any) -> None:
    """Write a routing's results, except the entries of rows that no choice has."""
    t = at.tokens * at.k
    offs, token_of_row, row_of, weight_of_row = made
    end = int(offs[-1])
    _tensor(at.offs, at.experts).copy_(offs)
    _tensor(at.row_of, at.tokens, at.k).copy_(row_of)
    _tensor(at.token_of_row, t)[:end] = token_of_row[:end]
    _tensor(at.weight_of_row, t, dtype=F32)[:end] = weight_of_row[:end]


def _choose(spec: LayerSpec, at: Any) -> None:
    assert at.experts <= spec.experts and at.chunk >= 1
    logits = _tensor(at.logits, at.tokens, at.experts, dtype=dtype_in(at.forms, 0))
    bias, limit = optional(at.bias, at.experts, dtype=F32), optional(at.num_tokens, 1, dtype=I32)
    score = ("softmax", "sigmoid")[at.score]
    made = reference.route(logits, bias, limit, at.k, score, bool(at.normalize), at.num_groups, at.top_groups, at.scale)
    ids, weights, *rows = made
    _tensor(at.ids, at.tokens, at.k).copy_(ids)
    _tensor(at.weights, at.tokens, at.k, dtype=F32).copy_(weights)
    if at.workspace:
        counts = _counts(ids, at)
        _tensor(at.workspace, *counts.shape).copy_(counts)
    else:
        assert at.chunk >= at.tokens
        _leave_rows(at, rows)


def _logits(spec: LayerSpec, at: Any) -> None:
    assert at.width % 8 == 0
    x = _tensor(at.x, at.tokens, at.width, dtype=getattr(torch, spec.dtype)).float()
    weight = _tensor(at.weight, at.experts, at.width, dtype=dtype_in(at.weight_form, 0)).float()
    bias = optional(at.weight_bias, at.experts, dtype=dtype_in(at.bias_form, 0))
    made = x @ weight.mT + (0 if bias is None else bias.float())
    _tensor(at.logits, at.tokens, at.experts, dtype=dtype_in(at.forms, 0)).copy_(made)


def _count(spec: LayerSpec, at: Any) -> None:
    assert at.experts <= spec.experts
    counts = _counts(_ids(at), at)
    _tensor(at.workspace, *counts.shape).copy_(counts)


def _place(spec: LayerSpec, at: Any) -> None:
    assert at.experts <= spec.experts
    ids = _ids(at)
    if at.workspace:
        counts = _counts(ids, at)
        assert _tensor(at.workspace, *counts.shape).equal(counts)
    else:
        assert at.chunk >= at.tokens
    weights = _tensor(at.weights, at.tokens, at.k, dtype=dtype_in(at.weight_form, 0))
    _leave_rows(at, reference.sort(ids, weights, None, None, at.experts, 0))


def _route_backward(spec: LayerSpec, at: Any) -> None:
    dtype, score = dtype_in(at.forms, 0), ("softmax", "sigmoid")[at.score]
    given = [
        _tensor(at.d_weights, at.tokens, at.k, dtype=F32), _tensor(at.logits, at.tokens, at.experts, dtype=dtype),
        _tensor(at.ids, at.tokens, at.k),
    ]  # fmt: skip
    (d_logits,) = reference.route_backward(*given, score, bool(at.normalize), at.scale)
    _tensor(at.d_logits, at.tokens, at.experts, dtype=dtype).copy_(d_logits)


def _row_weights_backward(spec: LayerSpec, at: Any) -> None:
    row_of = _tensor(at.row_of, at.tokens, at.k)
    d_rows = _tensor(at.d_rows, at.bound, dtype=F32)
    _tensor(at.d_weights, at.tokens, at.k, dtype=F32).copy_(reference.row_weights_backward(d_rows, row_of)[0])


def _permute(spec: LayerSpec, at: Any) -> None:
    dtype = getattr(torch, spec.dtype)
    x, row_of = _tensor(at.x, at.tokens, at.width, dtype=dtype), _tensor(at.row_of, at.tokens, at.k)
    rows = reference.permute(x, row_of)[0].view(-1, at.width)
    end = int((row_of >= 0).sum())
    _tensor(at.out, at.tokens * at.k, at.width, dtype=dtype)[:end] = rows[:end]


def _combine(spec: LayerSpec, at: Any) -> None:
    dtype = getattr(torch, spec.dtype)
    row_of = _tensor(at.row_of, at.tokens, at.k)
    y = _tensor(at.y, at.bound, at.width, dtype=dtype)
    residual = optional(at.residual, at.tokens, at.width, dtype=dtype)
    _tensor(at.out, at.tokens, at.width, dtype=dtype).copy_(reference.combine(y, row_of, residual)[0])


def _function_of(at: Any) -> tuple[str, str, Any]:
    """Return a call's activation, its gate layout, and the packed constants of all activations, for `gate_rows`."""
    name = ACTIVATIONS[at.kind]
    own = oracle.params_of(name, [getattr(at, argument.name) for argument in PARAMS])
    return name, GLU_LAYOUTS[at.glu_layout], packed(own)["numbers"]


def _gate(spec: LayerSpec, at: Any) -> None:
    dtype = getattr(torch, spec.dtype)
    columns = at.width * (2 if ACTIVATIONS[at.kind] in GATED else 1)
    preact, scale = _tensor(at.preact, at.tokens, columns, dtype=dtype), optional(at.row_scale, at.tokens, dtype=F32)
    _tensor(at.out, at.tokens, at.width, dtype=dtype).copy_(GateCall.on_cpu(preact, scale, *_function_of(at)))


def _gate_backward(spec: LayerSpec, at: Any) -> None:
    dtype = getattr(torch, spec.dtype)
    columns = at.width * (2 if ACTIVATIONS[at.kind] in GATED else 1)
    d_act, preact = (_tensor(one, at.tokens, n, dtype=dtype) for one, n in ((at.d_act, at.width), (at.preact, columns)))
    made = GateBackwardCall.on_cpu(d_act, preact, optional(at.row_scale, at.tokens, dtype=F32), *_function_of(at))
    _tensor(at.d_preact, at.tokens, columns, dtype=dtype).copy_(made[0])
    if at.d_row_scale:
        _tensor(at.d_row_scale, at.tokens, dtype=F32).copy_(made[1])


KERNELS: dict[str, Callable[[LayerSpec, Any], None]] = {
    "logits": _logits,
    "choose": _choose,
    "count": _count,
    "place": _place,
    "route_backward": _route_backward,
    "row_weights_backward": _row_weights_backward,
    "permute": _permute,
    "combine": _combine,
    "gate": _gate,
    "gate_backward": _gate_backward,
}


OF_RANKS: dict[str, Callable[[LayerSpec, Any], None]] = {
    "send_tokens": fake_ranks.send_tokens,
    "send_sums": fake_ranks.send_sums,
}
"""Kernels that send rows to other ranks. A rank takes part in them even without tokens."""


def run(spec: LayerSpec, at: Any) -> None:
    """Compute the kernel of a spec on its arguments, by name."""
    if spec.kernel in OF_RANKS:
        OF_RANKS[spec.kernel](spec, at)
    elif at.tokens:
        KERNELS[spec.kernel](spec, at)
