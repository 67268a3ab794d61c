"""HyperConnection: residual streams around a sublayer, as in mHC or in DeepSeek-V4.1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cute_kernels.mhc.boundary_shapes import COUNTS as BOUNDARY_COUNTS
from cute_kernels.mhc.kernels import COUNTS

from .. import mhc
from ..calls.addressed import check_dtype, check_vectors
from ..calls.checks import shape_text
from ..mhc.boundary import MAX_ITERS as MOST_ROUNDS
from ..mhc.call import check_count, check_eps, check_iters
from ..mhc.sinkhorn import MAX_ITERS
from ..names import Block
from .hyper_streams import HyperStreams
from .options import check_options, shown_options

ALPHA = 0.01
WEIGHT_STD = 0.02
OFF_DIAGONAL = -8.0
FORMS = ("mhc", "v4.1")
NORM_EPS = 1e-6


class HyperConnection(nn.Module):
    """Hyper-connection: n residual streams around any sublayer. `glulam.mhc` describes the operators.

        h_pre, h_post, logits = project(x);  y = sublayer(aggregate(x, h_pre))
        result = post_mix(x, sinkhorn(logits), h_post, y)

    Forward is two calls of compiled functions: one for everything before the sublayer, one for everything after it. x
    is used three times (project, aggregate, post_mix); in backward, the kernels that compute the three gradients of x
    also add them.

    Args:
        num_streams, width: n, and C, a stream's width. On a GPU n is 2, 4 or 8 ("v4.1": 4), and C a multiple of 8.
        sublayer: a module or function, called with [..., C] and with forward's further arguments. It returns y [..., C]
            or (y, bias [C]); post_mix adds the bias. None: call `pre` and `post` around your own code.
        iters, eps, sinkhorn_eps: see `mhc.sinkhorn` and `mhc.project`.
        transpose_res: see `mhc.post_mix`.
        norm_weight: True: there is a parameter norm_weight, the weight of the RMSNorm on the projection's input; see
            `mhc.project`.
        form: "mhc", or "v4.1" for DeepSeek-V4.1's hyper-connection. With "v4.1", forward takes and returns
            `HyperStreams`, and runs one `mhc.boundary` before the sublayer. The boundary includes the sublayer's
            RMSNorm. Its rms_eps is `eps`, and its eps is `sinkhorn_eps`. There is always a norm_weight, and
            transpose_res is not available.
        norm_eps: only for "v4.1": epsilon in the root of the sublayer's RMSNorm.
        device, dtype: device and dtype of the parameters: float32 by default, or 16-bit. Streams may have another
            dtype.

    Parameters of "mhc": weight [n n + 2n, n C], alpha_pre, alpha_post, alpha_res [1], bias [n n + 2n], and, on request,
    norm_weight [n C], initially ones. Parameters of "v4.1", named as in DeepSeek's checkpoints: fn [n n + 2n, n C],
    scale [3], base [n n + 2n] and norm_weight [C]. After initialisation the sublayer's input is about the mean of the
    streams, its output is added to each stream, and the streams hardly mix.

    Raises:
        ValueError, TypeError: at construction: an option is invalid, or options cannot work together.
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
        form: str = "mhc",
        norm_eps: float = NORM_EPS,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options(HyperConnection, locals())
        name = "HyperConnection"
        check_iters(name, iters, MAX_ITERS.get(num_streams))
        check_eps(name, eps)
        check_eps(name, sinkhorn_eps, "sinkhorn_eps")
        check_eps(name, norm_eps, "norm_eps")
        _check_form(form, norm_eps, iters, transpose_res, norm_weight)
        if sublayer is not None and not callable(sublayer):
            raise TypeError(f"{name}: sublayer is a {type(sublayer).__name__}; give a module or a function")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        streams = torch.empty(0, num_streams, width, **where)
        check_dtype(name, "dtype", streams)
        check_count(name, "x", streams, num_streams, BOUNDARY_COUNTS if form == "v4.1" else COUNTS)
        check_vectors(name, "x", "C", streams)
        self.num_streams, self.width, self.sublayer = num_streams, width, sublayer
        self.iters, self.eps, self.sinkhorn_eps, self.transpose_res = iters, eps, sinkhorn_eps, transpose_res
        self.form, self.norm_eps = form, norm_eps
        rows = num_streams * num_streams + 2 * num_streams
        if form == "v4.1":
            self.fn = Parameter(torch.empty(rows, num_streams * width, **where))
            self.scale, self.base = Parameter(torch.empty(3, **where)), Parameter(torch.empty(rows, **where))
            self.norm_weight = Parameter(torch.empty(width, **where))
            self.reset_parameters()
            return
        self.weight = Parameter(torch.empty(rows, num_streams * width, **where))
        self.alpha_pre, self.alpha_post, self.alpha_res = (Parameter(torch.empty(1, **where)) for _ in range(3))
        self.bias = Parameter(torch.empty(rows, **where))
        scale = Parameter(torch.empty(num_streams * width, **where)) if norm_weight else None
        self.register_parameter("norm_weight", scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set small random weights, and biases that make the residual streams hardly mix; see the class."""
        n, is_v41 = self.num_streams, self.form == "v4.1"
        weight, bias = (self.fn, self.base) if is_v41 else (self.weight, self.bias)
        with torch.no_grad():
            weight.normal_(0.0, WEIGHT_STD)
            for alpha in (self.scale,) if is_v41 else (self.alpha_pre, self.alpha_post, self.alpha_res):
                alpha.fill_(ALPHA)
            bias.zero_()
            bias[:n] = -math.log(n - 1) if n > 1 else 8.0
            bias[2 * n :] = OFF_DIAGONAL
            bias[2 * n :: n + 1] = 0.0
            if self.norm_weight is not None:
                self.norm_weight.fill_(1.0)

    @overload
    def boundary(
        self, carried: HyperStreams, *, x_block: None = None, return_x: bool = False
    ) -> mhc.BoundaryResults: ...  # fmt: skip
    @overload
    def boundary(
        self, carried: HyperStreams, *, x_block: Block, return_x: bool = False
    ) -> mhc.QuantizedBoundaryResults: ...  # fmt: skip
    def boundary(
        self, carried: HyperStreams, *, x_block: Block | None = None, return_x: bool = False
    ) -> mhc.BoundaryResults | mhc.QuantizedBoundaryResults:
        """Run `mhc.boundary` with the module's parameters, for code that calls the sublayer itself. Only form "v4.1".

        Args:
            carried: the previous connection's result; before the first connection, the result of `HyperStreams.begin`.
            x_block: "1x32" or "1x128": return the sublayer's input in MXFP8, with scales of blocks of that size; not
                differentiable. None: return it in the streams' dtype.
            return_x: True: with x_block, also return the sublayer's input in the streams' dtype.

        Returns:
            BoundaryResults: the updated streams, the sublayer's input, and the coefficients pre, post and comb for the
            next connection. With x_block: QuantizedBoundaryResults.

        Raises:
            RuntimeError: the module's form is not "v4.1".
            GradientNotSupported: grad mode is on, x_block is given, and a tensor requires a gradient.
        """
        self._check_is("v4.1", "boundary")
        streams, y, pre, post, comb = carried
        of_x: dict[str, Any] = {"x_block": x_block, "return_x": return_x}
        return mhc.boundary(
            y, streams, pre, post, comb, self.fn, self.scale, self.base, self.norm_weight,  # type: ignore[arg-type]
            self.eps, self.sinkhorn_eps, self.norm_eps, self.iters, **of_x,
        )  # fmt: skip

    def _check_is(self, form: str, method: str) -> None:
        if self.form != form:
            raise RuntimeError(f"HyperConnection: {method} is of form={form!r}, and this one is {self.form!r}")

    def pre(self, x: Tensor) -> mhc.PreResults:
        """Compute the sublayer's input and the coefficients for `post`. Only for form "mhc".

        Args:
            x: streams [..., n, C].

        Returns:
            `mhc.PreResults`; its `out` is the sublayer's input. Give the whole result to `post`.

        Raises:
            RuntimeError: the module's form is not "mhc".
            ValueError: x has another number of streams, or another width.
        """
        self._check_is("mhc", "pre")
        if isinstance(x, Tensor) and tuple(x.shape[-2:]) != (self.num_streams, self.width):
            wanted = f"[..., {self.num_streams}, {self.width}]"
            raise ValueError(f"HyperConnection: x has shape {shape_text(x.shape)}; give streams {wanted}")
        parameters = (self.weight, self.alpha_pre, self.alpha_post, self.alpha_res, self.bias)
        return mhc.pre(x, *parameters, self.eps, self.iters, self.sinkhorn_eps, norm_weight=self.norm_weight)

    def post(self, made: mhc.PreResults, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the streams [..., n, C] after the update with the sublayer's output y. Only for form "mhc".

        Args:
            made: the `mhc.PreResults` that `pre` returned.
            y: the sublayer's output [..., C].
            bias: [C], added to y; None: no bias.
        """
        return mhc.post_mix(made.residual, made.h_res, made.h_post, y, bias, transpose_res=self.transpose_res)

    def forward(self, x: Any, *arguments: Any, **named: Any) -> Any:
        """Mix the streams to the sublayer's input, run the sublayer, and update the streams with its output.

        Args:
            x: streams [..., n, C]; with form "v4.1" `HyperStreams`.
            *arguments, **named: passed on to the sublayer.

        Returns:
            The new streams, of the same type as x. With form "v4.1", the update with this sublayer's output is part of
            the next connection's forward.

        Raises:
            RuntimeError: the module has no sublayer.
            TypeError: form is "v4.1", and x is not a HyperStreams.
        """
        if self.sublayer is None:
            ways = "boundary yourself" if self.form == "v4.1" else "pre and post yourself"
            raise RuntimeError(f"HyperConnection: made without a sublayer; give it one, or call {ways}")
        if self.form == "v4.1":
            if not isinstance(x, HyperStreams):
                raise TypeError(f"HyperConnection: x is a {type(x).__name__}; form='v4.1' takes HyperStreams")
            streams, entered, pre, post, comb = self.boundary(x)
            y = self.sublayer(entered, *arguments, **named)
            y = y[0] + y[1] if isinstance(y, tuple) else y
            return HyperStreams(streams, y.to(streams.dtype), pre, post, comb)  # autocast may have made another
        made = self.pre(x)
        y = self.sublayer(made.out, *arguments, **named)
        y, bias = y if isinstance(y, tuple) else (y, None)
        return self.post(made, y, bias)

    def extra_repr(self) -> str:
        return shown_options(
            HyperConnection, num_streams=self.num_streams, width=self.width, iters=self.iters,
            transpose_res=self.transpose_res, norm_weight=self.form == "mhc" and self.norm_weight is not None,
            form=self.form,
        )  # fmt: skip


def _check_form(form: Any, norm_eps: float, iters: int, transpose_res: bool, norm_weight: bool) -> None:
    """Raise ValueError if the form is unknown, or if an option is not available with this form."""
    if form not in FORMS:
        raise ValueError(f"HyperConnection: form is {form!r}; choose one of: {', '.join(map(repr, FORMS))}")
    if form == "v4.1" and (transpose_res or norm_weight):
        name = "transpose_res" if transpose_res else "norm_weight"
        raise ValueError(f"HyperConnection: {name} is True; form='v4.1' has no such choice, so leave it out")
    if form == "v4.1" and not 1 <= iters <= MOST_ROUNDS:
        raise ValueError(f"HyperConnection: iters is {iters}; form='v4.1' takes 1 to {MOST_ROUNDS}")
    if form != "v4.1" and norm_eps != NORM_EPS:
        raise ValueError("HyperConnection: norm_eps is of form='v4.1'; leave it out, or give that form")
