"""KERNELS, the table of hyper-connection kernels: each kernel's arguments, module, dtypes and numbers of residual
streams.

Three arguments occur in many kernels. `forms` holds the dtypes of coefficients and parameters, two bits for each tensor
(numbers of `dtypes.PARAM_FORMS`), in the order in which the kernel lists these tensors' addresses. `tokens` is T.
`width` is the columns of one stream.
"""

from __future__ import annotations

from ..arguments import Signature, numbers
from ..dtypes import DTYPES, WIDE_DTYPES
from ..kernels import ANY, Kernel
from .boundary_shapes import COUNTS as BOUNDARY_COUNTS

COUNTS = (2, 4, 8)
"""Numbers of residual streams for which kernels are compiled, unless a kernel's `counts` says otherwise."""


def _of_streams(module: str, arguments: Signature | None = None) -> Kernel:
    """Make the entry of KERNELS for a kernel of residual streams, which ships for all WIDE_DTYPES of the streams.

    arguments: None: a chain of kernels, whose steps determine its arguments.
    """
    return Kernel(arguments, module, tuple(WIDE_DTYPES), tuple(WIDE_DTYPES))


def _of_logits(arguments: Signature) -> Kernel:
    """Make the entry of KERNELS for a Sinkhorn kernel, which takes logits of any dtype."""
    return Kernel(arguments, "mhc.sinkhorn", ANY, ANY)


def _of_boundaries(module: str, arguments: Signature) -> Kernel:
    """Make the entry of KERNELS for a kernel of `boundary`: for 16-bit streams, in the numbers of BOUNDARY_COUNTS."""
    return Kernel(arguments, module, tuple(DTYPES), tuple(DTYPES), counts=BOUNDARY_COUNTS)


_PROJECT_BACKWARD = numbers(
    "d_pre d_post d_res x weight alpha_pre alpha_post alpha_res bias stats d_aggregate h_pre d_residual "
    "d_x d_weight d_sums workspace",
    "forms tokens width ctas parts",
    "eps",
)
KERNELS: dict[str, Kernel] = {
    "sinkhorn": _of_logits(numbers("logits out", "forms matrices iters", "eps")),
    "sinkhorn_backward": _of_logits(numbers("d_out logits d_logits", "forms matrices iters", "eps")),
    "aggregate": _of_streams("mhc.aggregate", numbers("x h_pre out", "forms tokens width")),
    "aggregate_backward": _of_streams(
        "mhc.aggregate", numbers("d_out x h_pre d_x d_h_pre", "forms tokens width num_sms")
    ),
    "post_mix": _of_streams(
        "mhc.post_mix", numbers("residual h_res h_post x bias out", "forms transpose tokens width")
    ),
    "post_mix_backward": _of_streams(
        "mhc.post_mix",
        numbers(
            "d_out residual h_res h_post x bias d_residual d_h_res d_h_post d_x d_bias workspace",
            "forms transpose tokens width num_sms",
        ),
    ),
    "project": _of_streams(
        "mhc.project",
        numbers(
            "x weight alpha_pre alpha_post alpha_res bias h_pre h_post h_res stats workspace",
            "forms tokens width slices slice_columns groups num_sms",
            "eps",
        ),
    ),
    "project_backward": _of_streams("mhc.project_backward", _PROJECT_BACKWARD),
    "boundary": _of_boundaries(
        "mhc.boundary",
        numbers(
            "y streams pre post comb weight scale base norm_weight new_streams x new_pre new_post new_comb stats "
            "x_data x_scale workspace",
            "forms tokens width parts iters x_block",
            "rms_eps eps norm_eps",
        ),
    ),
    "boundary_backward": _of_boundaries(
        "mhc.boundary_backward",
        numbers(
            "d_new_streams d_x d_new_pre d_new_post d_new_comb y streams pre post comb weight scale base norm_weight x "
            "stats d_y d_streams d_pre d_post d_comb d_weight d_norm_weight d_sums workspace",
            "forms tokens width token_ctas parts iters",
            "eps",
        ),
    ),
    "pre": _of_streams(""),
    "pre_backward": _of_streams("mhc.project_backward", _PROJECT_BACKWARD),
}
