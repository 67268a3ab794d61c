"""Base class of the hyper-connection operators' calls, and checks of arguments from metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from cute_kernels.mhc.kernels import COUNTS
from cute_kernels.specs import MhcSpec

from ..calls.addressed import MAX_TOKENS, AddressedCall, check_dtype, check_vectors, forms
from ..calls.checks import check_number, check_tensor, runs_kernels, shape_text
from ..choose.problem import dtype_name


def _constants(call: Any) -> dict[str, Any]:
    parameters = [getattr(call, name) for name in call.formed]
    return {"forms": forms(*parameters), "width": call.lead.shape[-1]}


USUAL_SMS = 132
"""Number of SMs of an H100. Sums are cut for this number if results must not depend on the GPU that computes them."""


def sms_to_cut_by(call: Any) -> int:
    """Return the number of SMs that decides into how many parts a call's sums are cut.

    A call that must be batch-invariant uses `USUAL_SMS`, any other its GPU's number.
    """
    return USUAL_SMS if call.invariant else int(call.gpu.sm_count)


class MhcCall(AddressedCall):
    """A call of a hyper-connection operator.

    `formed`: names of the parameters whose dtypes are passed to the kernel, as the constant `forms`.
    """

    family = "mhc"
    trailing = 2
    shared = frozenset(("weight", "alpha_pre", "alpha_post", "alpha_res", "bias"))
    formed: ClassVar[tuple[str, ...]] = ()
    definition = AddressedCall.definition.extended(constants=(_constants,))

    def spec(self, arch: str) -> MhcSpec:
        dtype = "float32" if "sinkhorn" in self.kernel else dtype_name(self.lead.dtype)
        return MhcSpec(self.kernel, dtype, self.lead.shape[-2], arch)


def check_param(op: str, name: str, value: Any, shape: tuple[int, ...], like: Tensor, why: str) -> Tensor:
    """Check that argument `name` is a tensor of this shape, on the device of `like`, and return it.

    Its dtype may be any that `check_dtype` allows. `why`: the reason for the shape, for messages.
    """
    tensor = check_tensor(op, name, value, f"a tensor {shape_text(shape)}", like, shape=shape, why=why)
    check_dtype(op, name, tensor)
    return tensor


def check_count(op: str, name: str, tensor: Tensor, n: int, counts: Sequence[int] = COUNTS) -> None:
    """Check n, the number of streams of argument `name`. counts: the numbers that kernels exist for."""
    if n == 0 or (runs_kernels(tensor) and n not in counts):
        choices = ", ".join(map(str, counts))
        raise ValueError(
            f"{op}: {name} has shape {shape_text(tensor.shape)}, so {n} streams; kernels exist for n = {choices}"
        )


def check_streams(
    op: str, name: str, value: Any, counts: Sequence[int] = COUNTS
) -> tuple[tuple[int, ...], int, int]:  # fmt: skip
    """Check that `value` is a tensor of streams [..., n, C]; return its leading shape, n and C.

    counts: the values of n that kernels support (see `check_count`).
    """
    x = check_tensor(op, name, value, "streams [..., n, C]")
    check_dtype(op, name, x)
    if x.dim() < 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(x.shape)}; give [..., n, C]")
    *lead, n, width = x.shape
    check_count(op, name, x, n, counts)
    check_vectors(op, name, "C", x)
    if x.numel() // (n * width) >= MAX_TOKENS:
        raise ValueError(f"{op}: {name} has {x.numel() // (n * width)} tokens; at most {MAX_TOKENS - 1} are possible")
    return tuple(lead), n, width


def check_eps(op: str, eps: Any, name: str = "eps") -> None:
    check_number(op, name, eps)
    if not eps >= 0:
        raise ValueError(f"{op}: {name} is {eps}; it keeps a divisor above zero, so give a small positive number")


def check_iters(op: str, iters: Any, limit: int | None) -> None:
    if isinstance(iters, bool) or not isinstance(iters, int):
        raise TypeError(f"{op}: iters is {iters!r}; give an integer")
    if iters < 0 or (limit is not None and iters > limit):
        most = "" if limit is None else f" and at most {limit}, whose factors fit shared memory in backward"
        raise ValueError(f"{op}: iters is {iters}; it must be 0 or more{most}")
