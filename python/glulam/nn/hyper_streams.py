"""HyperStreams: the tensors that one hyper-connection of DeepSeek-V4.1 passes to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import mhc


class HyperStreams(NamedTuple):
    """Residual streams, the last sublayer's output, and the coefficients that the last hyper-connection computed.

    The streams are not updated after a sublayer: the next connection's `mhc.boundary` does that in its own pass over
    memory.

    Attributes:
        streams: [..., n, D], n streams, not yet updated with y.
        y: [..., D], the last sublayer's output; None: the streams are already updated.
        pre: [..., n], weights of the sum over streams that is the next sublayer's input.
        post, comb: [..., n] and [..., n, n], coefficients of the update with y; None if y is None.
    """

    streams: Tensor
    y: Tensor | None
    pre: Tensor
    post: Tensor | None
    comb: Tensor | None

    @classmethod
    def begin(cls, x: Tensor, num_streams: int) -> HyperStreams:
        """Return the streams that a model starts with: num_streams copies of an embedding x [..., D].

        `pre` is 1 for stream 0 and 0 for the others, so the first sublayer's input is x.
        """
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).contiguous()
        pre = x.new_zeros(*x.shape[:-1], num_streams, dtype=torch.promote_types(x.dtype, torch.float32))
        pre[..., 0] = 1
        return cls(streams, None, pre, None, None)

    def updated(self) -> HyperStreams:
        """Update the streams with y now, for code that reads or changes streams; in the result y is None.

        The update is then a separate pass over memory instead of a part of the next `mhc.boundary`.
        """
        if self.y is None or self.post is None or self.comb is None:
            return self
        streams = mhc.post_mix(self.streams, self.comb, self.post, self.y, transpose_res=True)
        return HyperStreams(streams, None, self.pre, None, None)

    def end(self) -> Tensor:
        """Return the input [..., D] of a model's last norm: the updated streams, summed with the weights `pre`."""
        return mhc.aggregate(self.updated().streams, self.pre)
