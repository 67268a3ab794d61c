"""HyperConnection: residual streams around a sub-layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import mhc
from ..calls.addressed import check_dtype, check_vectors
from ..mhc.call import check_count, check_eps, check_iters
from ..mhc.sinkhorn import MAX_ITERS
from .options import check_options, shown_options

ALPHA = 0.01
WEIGHT_STD = 0.02
OFF_DIAGONAL = -8.0


class HyperConnection(nn.Module):
    """n residual streams around any sub-layer; see `glulam.mhc` for the operators.

        h_pre, h_post, logits = project(x);  y = sublayer(aggregate(x, h_pre))
        result = post_mix(x, sinkhorn(logits), h_post, y)

    All before the sub-layer is one call of a compiled function, all behind it another; and in backward the three
    gradients of x are added up where they are made.

    Args:
        num_streams, width: n and C. On a GPU n is 2, 4 or 8, and C a multiple of 8.
        sublayer: called with [..., C] and what forward is given besides; returns [..., C] or (that, bias [C]), a bias
            that post_mix is to add. None: call `pre` and `post` around your own code.
        iters, eps, sinkhorn_eps: of `mhc.sinkhorn` and `mhc.project`.
        transpose_res: of `mhc.post_mix`.
        norm_weight: whether there is such a parameter, of `mhc.project`: an RMSNorm's weight on the projection's input.
        device, dtype: of the parameters; float32 by default, or 16-bit. Streams may be of another dtype.

    Parameters: weight [n n + 2n, n C], alpha_pre, alpha_post, alpha_res [1], bias [n n + 2n], and norm_weight [n C],
    ones, where it is asked for. As they are made, the sub-layer sees about the mean of the streams, each stream gets
    its output, and they hardly mix.

    Raises:
        ValueError, TypeError: at construction, for options that cannot work.
    """

    norm_weight: Parameter | None

    def __init__(
        self,
        num_streams: int,
        width: int,
        sublayer: Callable[..., Any] | None = None,
        *,
        iters: int = 20,
        eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        transpose_res: bool = False,
        norm_weight: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options(HyperConnection, locals())
        name = "HyperConnection"
        check_iters(name, iters, MAX_ITERS.get(num_streams))
        check_eps(name, eps)
        check_eps(name, sinkhorn_eps, "sinkhorn_eps")
        if sublayer is not None and not callable(sublayer):
            raise TypeError(f"{name}: sublayer is a {type(sublayer).__name__}; give a module or a function")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        streams = torch.empty(0, num_streams, width, **where)
        check_dtype(name, "dtype", streams)
        check_count(name, "x", streams, num_streams)
        check_vectors(name, "x", "C", streams)
        self.num_streams, self.width, self.sublayer = num_streams, width, sublayer
        self.iters, self.eps, self.sinkhorn_eps, self.transpose_res = iters, eps, sinkhorn_eps, transpose_res
        rows = num_streams * num_streams + 2 * num_streams
        self.weight = Parameter(torch.empty(rows, num_streams * width, **where))
        self.alpha_pre, self.alpha_post, self.alpha_res = (Parameter(torch.empty(1, **where)) for _ in range(3))
        self.bias = Parameter(torch.empty(rows, **where))
        scale = Parameter(torch.empty(num_streams * width, **where)) if norm_weight else None
        self.register_parameter("norm_weight", scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small weights, and biases that make the identity of residual streams: see the class."""
        n = self.num_streams
        with torch.no_grad():
            self.weight.normal_(0.0, WEIGHT_STD)
            for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
                alpha.fill_(ALPHA)
            self.bias.zero_()
            self.bias[:n] = -math.log(n - 1) if n > 1 else 8.0
            self.bias[2 * n :] = OFF_DIAGONAL
            self.bias[2 * n :: n + 1] = 0.0
            if self.norm_weight is not None:
                self.norm_weight.fill_(1.0)

    def pre(self, x: Tensor) -> mhc.PreResults:
        """Streams [..., n, C] to the sub-layer's input and what `post` takes."""
        parameters = (self.weight, self.alpha_pre, self.alpha_post, self.alpha_res, self.bias)
        return mhc.pre(x, *parameters, self.eps, self.iters, self.sinkhorn_eps, norm_weight=self.norm_weight)

    def post(self, made: mhc.PreResults, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """The new streams, from what `pre` made and the sub-layer's output."""
        return mhc.post_mix(made.residual, made.h_res, made.h_post, y, bias, transpose_res=self.transpose_res)

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Streams [..., n, C] to streams; further arguments go to the sub-layer."""
        if self.sublayer is None:
            raise RuntimeError("HyperConnection: made without a sublayer; give it one, or call pre and post yourself")
        made = self.pre(x)
        y = self.sublayer(made.out, *arguments, **named)
        y, bias = y if isinstance(y, tuple) else (y, None)
        return self.post(made, y, bias)

    def extra_repr(self) -> str:
        return shown_options(
            HyperConnection, num_streams=self.num_streams, width=self.width, iters=self.iters,
            transpose_res=self.transpose_res, norm_weight=self.norm_weight is not None,
        )  # fmt: skip
