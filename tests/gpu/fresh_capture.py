"""A process whose very first call is captured in a CUDA graph, with nothing loaded, cached or warmed up. Prints "ok".

usage: fresh_capture.py packed|list
"""

from __future__ import annotations

import sys

import torch
from support.criterion import same_bits
from support.inputs import make_case

import glulam


def main(weights: str) -> None:
    c = make_case([30, 0, 120, 7], 128, 96, tail=3, device="cuda")
    w1, w2 = (list(c.w1), list(c.w2)) if weights == "list" else (c.w1, c.w2)
    offs, out = c.offs, torch.zeros(c.x.shape[0], 128, dtype=c.x.dtype, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        glulam.grouped_mlp(c.x, w1, w2, offs=offs, b1=c.b1, row_scale=c.row_scale, out=out)
    assert not bool(out.any()), "something ran during capture"
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        eager = glulam.grouped_mlp(c.x, w1, w2, offs=offs, b1=c.b1, row_scale=c.row_scale)
    assert bool(eager[: c.rows].any()) and same_bits(out[: c.rows], eager[: c.rows])
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
