"""KERNELS, the table of the kernels around a layer's experts, with the arguments of each.

A choice is a pair (token n, j-th of its k experts). Arguments are addresses of tensors (0: not given), sizes, and:

    forms                       the dtype of logits (`dtypes.PARAM_FORMS`)
    weight_form, bias_form      dtypes of a router's parameters; in "place", weight_form: of choices' weights
    wide                        1: ids have 64 bits; 0: 32 bits
    first                       subtracted from ids
    expert_map, num_mapped      int32 [num_mapped], an id's index among the experts of this rank, or -1; 0: no map, ids
                                (less `first`) are these indices
    chunk                       number of consecutive tokens that a CTA handles
    workspace                   int32 [chunks, experts], choices of each chunk; 0: there is one chunk
    num_tokens                  int32, how many tokens are not padding; 0: all
    row_of                      int32 [N, k], the row of each choice, or -1
    offs                        int32 [E], ends of the experts' groups of rows
    token_of_row, weight_of_row [T], the token and the weight of each row
    position                    how many kernels the same call launches before this one
    bound                       rows of y or d_rows; row numbers from `bound` on are ignored

Further arguments of send_tokens and send_sums:

    most                        the most tokens of a rank
    regions                     int64 [REGIONS, world], the address of each region of each rank's window (windows.py)
    state                       int64 [STATE], this rank's own state (windows.py)
    handle                      int64 [1 + world]: the dispatch's number, and how many tokens came from each rank
    sum_rows, weight_places     tables for sending results back (`ranks.send_tokens.Table`)
    status                      the format of x, an index of `windows.STATUSES`; for MXFP8 rows, `x_scale` has a
                                byte for 32 elements
    is_summed                   1: y is [world, most, H], a rank's rows of each token already added; 0: y has rows, and
                                row_of [world, most, k] says whose
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments import NAMES_OF_PARAMS, Signature, numbers
from ..dtypes import DTYPES, WIDE_DTYPES
from ..kernels import ANY, Kernel

CAPACITIES = (128, 256, 1024)
"""Sizes of routing kernels: the most experts among which each can route. There is a limit because a warp holds a
token's logits in registers, and a CTA holds a count for each pair of an expert and a warp."""
_ROWS_OF = "offs token_of_row row_of weight_of_row"
_BACK = "sum_rows weight_places handle regions state"


def _routing(
    arguments: Signature | None = None, module: str = "", dtypes: Sequence[str] = ANY, ships: Sequence[str] = ()
) -> Kernel:
    """Make the entry of KERNELS for a routing kernel; the arguments are fields of `Kernel`. A routing kernel is
    compiled once for each of CAPACITIES, the most experts among which it can route."""
    return Kernel(arguments, module, dtypes, ships, is_sized=True)


def _of_rows(module: str, arguments: Signature) -> Kernel:
    """Make the entry of KERNELS for a kernel that reads tokens or rows. It is compiled, and ships, for all
    WIDE_DTYPES."""
    return Kernel(arguments, module, tuple(WIDE_DTYPES), tuple(WIDE_DTYPES))


KERNELS: dict[str, Kernel] = {
    "route": _routing(ships=ANY),
    "sort": _routing(ships=ANY),
    "router": _routing(dtypes=tuple(WIDE_DTYPES), ships=tuple(DTYPES)),
    "choose": _routing(
        numbers(
            f"logits bias num_tokens ids weights {_ROWS_OF} workspace",
            "forms tokens experts k score normalize num_groups top_groups chunk position",
            "scale",
        ),
        "layer.route",
    ),
    "count": _routing(
        numbers("ids num_tokens expert_map workspace", "wide first num_mapped tokens experts k chunk"), "layer.route"
    ),
    "place": _routing(
        numbers(
            f"ids weights num_tokens expert_map {_ROWS_OF} workspace",
            "wide weight_form first num_mapped tokens experts k chunk position",
        ),
        "layer.route",
    ),
    "logits": Kernel(
        numbers("x weight weight_bias logits", "forms weight_form bias_form tokens width experts"),
        "layer.logits",
        tuple(WIDE_DTYPES),
    ),
    "permute": _of_rows("layer.rows", numbers("x row_of out", "tokens k width position")),
    "combine": _of_rows("layer.rows", numbers("y row_of residual out", "tokens k width bound position", optional=True)),
    "gate": _of_rows("layer.gate", numbers("preact row_scale out", "tokens width kind glu_layout", NAMES_OF_PARAMS)),
    "gate_backward": _of_rows(
        "layer.gate",
        numbers("d_act preact row_scale d_preact d_row_scale", "tokens width kind glu_layout", NAMES_OF_PARAMS),
    ),
    "send_tokens": _of_rows(
        "ranks.send_tokens",
        numbers(f"x x_scale ids weights {_BACK}", "tokens k width experts most rank world status num_sms"),
    ),
    "send_sums": _of_rows(
        "ranks.send_sums", numbers(f"y row_of d_weights {_BACK}", "tokens k width most is_summed rank world num_sms")
    ),
    "route_backward": Kernel(
        numbers("d_weights logits ids d_logits", "forms tokens experts k score normalize", "scale"),
        "layer.route_backward",
        ships=ANY,
    ),
    "row_weights_backward": Kernel(numbers("d_rows row_of d_weights", "tokens k bound"), "layer.rows", ships=ANY),
}
RANK_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.module.startswith("ranks."))
"""Names of the kernels that write to other ranks of the same host: send_tokens and send_sums. send_tokens moves bytes
of any dtype."""
