"""HyperStreams: what one hyper-connection of DeepSeek-V4.1 hands to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import mhc


class HyperStreams(NamedTuple):
    """Residual streams, the last sublayer's output, and the coefficients that the last connection made.

    Attributes:
        streams: [..., n, D], before the update with y.
        y: [..., D], or None if the streams are up to date.
        pre: [..., n], for the next mix. post: [..., n] and comb: [..., n, n], for the update; None without y.
    """

    streams: Tensor
    y: Tensor | None
    pre: Tensor
    post: Tensor | None
    comb: Tensor | None

    @classmethod
    def begin(cls, x: Tensor, num_streams: int) -> HyperStreams:
        """Return equal copies of an embedding [..., D], of which the first mix takes the first."""
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).contiguous()
        pre = x.new_zeros(*x.shape[:-1], num_streams, dtype=torch.promote_types(x.dtype, torch.float32))
        pre[..., 0] = 1
        return cls(streams, None, pre, None, None)

    def updated(self) -> HyperStreams:
        """Return the streams after the update with y, for code that changes them before the next mix: the update is
        then a pass of its own.
        """
        if self.y is None or self.post is None or self.comb is None:
            return self
        streams = mhc.post_mix(self.streams, self.comb, self.post, self.y, transpose_res=True)
        return HyperStreams(streams, None, self.pre, None, None)

    def end(self) -> Tensor:
        """Return the updated streams' mix [..., D], which a model's last norm takes."""
        return mhc.aggregate(self.updated().streams, self.pre)
