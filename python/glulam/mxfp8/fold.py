"""Folding: a weight in MXFP8 with one power of two for each row, instead of one for each 32 elements.

Hopper's tensor cores know no block scales, and scaling each 32-wide partial sum outside of them costs as much as the
MMA. A power of two can move from a scale into the elements, since E4M3 is a floating-point format: q 2^s = (q 2^(s-S))
2^S, exactly, down to the spacing of its subnormals, 2^-9. So elements keep all bits but those under 2^-18 of their
row's maximum, and the scale is left to the epilogue, one multiplication for each element of a result.

One power for a row, and not for a block of 128 x 128: the block would enter the promotion of every 128 of the
contraction; the kernels would have to fetch it along with the operands, and its rows would have to be those of a tile,
which depends on glu_layout, while a row carries its scale wherever a layout puts it, as it carries a bias. A row that
is much larger than its neighbours costs them nothing. What a block would confine and a row does not, a massive input
channel, costs bits only where it is more than 2^10 times the rest, and the report says how many.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels.chains import signature_of
from cute_kernels.specs import FoldMxfp8Spec

from .. import device as gpus
from .. import kernels
from ..signature import shape_text
from .layout import AXES, BLOCK, BLOCK_SIZES, DATA_DTYPE, SCALE_DTYPE
from .reference import E8M0_INF, E8M0_NAN, F32_MANTISSA_BITS, quantize_rows, scales_of, to_e4m3
from .tensor import InMXFP8, MXFP8Tensor, pass_through_torch

OP = "prepare_mxfp8_weight"
MAX_ERROR = 1e-2
"""Of a block's norm; quantising it to MXFP8 costs 2.6e-2."""
VECTOR_BYTES = 16
"""What a kernel's address is a multiple of."""
WIDE = BLOCK_SIZES["1x128"]
WIDE_BLOCKS = WIDE // BLOCK
MAX_BINADES = 32
NEGLIGIBLE_BINADES = 24
"""A block so far under its row's maximum is under what float32 accumulation of the row keeps."""
CHUNK_ELEMENTS = 1 << 24
"""Converted at a time: 64 MB in float32, and a few times that while it lasts."""
E4M3_MAX_MANTISSA, E4M3_MAX_EXPONENT = 0.875, 9  # 448 = 0.875 * 2^9
LOST = -40
"""No E4M3 number times 2^LOST rounds to anything but 0."""

Weight = Tensor | MXFP8Tensor | Sequence[Tensor]


class FoldError(ValueError):
    """A weight that folding would change too much, or that is not finite; the message names the expert."""


class Place(NamedTuple):
    """A block of 32: its expert, row and number along the contraction, and by how many binades folding moves it."""

    expert: int
    row: int
    block: int
    binades: int


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What folding changed of a weight in MXFP8.

    Attributes:
        binades: how many blocks of 32 were moved down by 0, 1, 2, ... powers of two; the last, by so many or more.
            Blocks of zeros are not counted.
        changed: elements with another value than before, as a share of those that are not zero.
        error: the largest change of a row, in norm, relative to the row's norm.
        error_bound: the same for a block of 32: no result moves by more than this share of sum_b |w_b| |x_b|, whatever
            the activations. Blocks under 2^-24 of their row's maximum are left out of it.
        worst: the block where that is.
    """

    binades: tuple[int, ...]
    changed: float
    error: float
    error_bound: float
    worst: Place

    def __str__(self) -> str:
        blocks = max(sum(self.binades), 1)
        shares = [f"{d}: {n / blocks:.2%}" for d, n in enumerate(self.binades) if n]
        return (
            f"folded: {self.changed:.2e} of the elements changed; at most {self.error:.1e} of a row and "
            f"{self.error_bound:.1e} of a block; blocks by binades moved: {', '.join(shares) or 'none'}"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FoldedWeight(InMXFP8):
    """Expert weights as the FP8 GEMMs read them. They copy and pickle, and pass torch.load(weights_only=True).

    Attributes:
        data: [E, R, C] float8_e4m3fn, contiguous, C the contraction: [E, N, K] for axis "row", the forward's;
            [E, K, N], transposed, for axis "col", the data gradient's, since FP8 wgmma reads along the contraction.
        scale: [E, R] float8_e8m0fnu, one power of two a row.
        axis: "row" or "col".
        report: what folding changed; None where it was not asked for.

    Raises:
        ValueError, TypeError: the parts do not fit together.
    """

    data: Tensor
    scale: Tensor
    axis: str
    report: FoldReport | None

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"FoldedWeight: axis is {self.axis!r}; choose one of {', '.join(AXES)}")
        self.check_parts()
        shape = tuple(self.data.shape)
        if len(shape) != 3 or tuple(self.scale.shape) != shape[:2]:
            raise ValueError(
                f"FoldedWeight: data has shape {shape_text(shape)} and scale {shape_text(self.scale.shape)}; they must "
                "be [E, R, C] and [E, R]"
            )

    def dequantize(self) -> Tensor:
        """[E, N, K], float32."""
        values = self.data.float() * scales_of(self.scale.view(torch.uint8))[..., None]
        return values if self.axis == "row" else values.mT.contiguous()

    def to(self, device: torch.device | str | int) -> FoldedWeight:
        data = self.data.to(device)
        return self if data is self.data else dataclasses.replace(self, data=data, scale=self.scale.to(device))

    def __repr__(self) -> str:
        return f"FoldedWeight({shape_text(self.data.shape)}, axis={self.axis!r}, device={str(self.data.device)!r})"


class FoldedWeights(NamedTuple):
    """A weight folded along both axes, for training."""

    row: FoldedWeight
    col: FoldedWeight


def _dump(form: tuple[str, FoldReport | None]) -> list[Any]:
    axis, report = form
    return [axis, None if report is None else dataclasses.asdict(report)]


def _load(dumped: list[Any]) -> tuple[str, FoldReport | None]:
    axis, report = dumped
    if report is None:
        return axis, None
    return axis, FoldReport(**{**report, "binades": tuple(report["binades"]), "worst": Place(*report["worst"])})


pass_through_torch(FoldedWeight, ("axis", "report"), _dump, _load, also=[FoldedWeights, FoldReport, Place])


def prepare_mxfp8_weight(w: Weight, *, axis: str = "row", max_error: float = MAX_ERROR, report: bool = True) -> Any:
    """Quantise expert weights to MXFP8 and fold their scales to one power of two a row; once, at load, or each step.

    On a GPU one kernel does it for an axis of a packed weight, or of each expert of a list. The report takes torch's
    operators many times as long.

    Args:
        w: [E, N, K], or a list of E tensors [N, K]: bfloat16, float16 or float32. Or an MXFP8Tensor [E, N, K] whose
            axis is the one wanted. N and K are multiples of 32.
        axis: the contraction: "row", along K, for y = x w^T; "col", along N, for the data gradient dx = dy w; "both".
        max_error: the largest `FoldReport.error_bound` to accept.
        report: False makes none, so that nothing is read back from a GPU, and then refuses nothing: a row with a NaN
            or an Inf has one in its data or its scale is 2^127.

    Returns:
        FoldedWeight on w's device, or FoldedWeights (row, col) for "both".

    Raises:
        FoldError (a ValueError): an expert that folding would change by more than max_error, or that has a NaN or Inf.
        ValueError, TypeError: an argument that does not fit.
        UnsupportedDevice, BundleError (RuntimeErrors): w is on a GPU, but there is no kernel for it.
    """
    if axis not in (*AXES, "both"):
        raise ValueError(f"{OP}: axis is {axis!r}; choose one of row, col, both")
    if not max_error >= 0:
        raise ValueError(f"{OP}: max_error is {max_error!r}; give a number of at least 0")
    if axis == "both":
        return FoldedWeights(*(prepare_mxfp8_weight(w, axis=one, max_error=max_error, report=report) for one in AXES))
    _check(w, axis)
    with torch.no_grad():
        folded = _empty(w, axis)
        by_kernel = not isinstance(w, MXFP8Tensor) and folded.data.device.type == gpus.KERNEL_DEVICE
        if by_kernel:
            _fold_by_kernel(w, folded)
        if by_kernel and not report:
            return folded
        tally = _fold_by_torch(_experts(w, axis), None if by_kernel else folded, report)
        return folded if tally is None else dataclasses.replace(folded, report=_checked(tally, max_error))


def rebase_mxfp8(q: MXFP8Tensor) -> MXFP8Tensor:
    """The same values with one scale for 128 elements, as the FP8 GEMMs want activations: "1x32" to "1x128".

    Folding as for weights, within 128 elements: exact but for what lies under 2^-17.8 of their maximum. A NaN in one of
    the four scales makes all four NaN.

    Args:
        q: plain scales, by rows; itself where it is "1x128" already.

    Raises:
        ValueError: other scales.
    """
    if q.block == "1x128":
        return q
    if q.axis != "row" or q.scale_layout != "plain":
        raise ValueError(f"rebase_mxfp8: q is {q!r}; give one quantised by rows, with plain scales")
    rows, blocks = q.shape.numel() // q.shape[-1], q.scale.shape[-1]
    padded = pad(q.data.view(torch.uint8).view(rows, -1), (0, -q.shape[-1] % WIDE)).view(DATA_DTYPE)
    exponents = pad(q.scale.view(torch.uint8).view(rows, -1), (0, -blocks % WIDE_BLOCKS)).view(-1, WIDE_BLOCKS)
    folded, target, _ = _rebased(padded.float().view(-1, WIDE_BLOCKS, BLOCK), exponents)
    target = target.masked_fill((exponents == E8M0_NAN).any(dim=1), E8M0_NAN)
    data = to_e4m3(folded).view(rows, -1)[:, : q.shape[-1]].reshape(q.shape)
    scale = target.view(rows, -1).repeat_interleave(WIDE_BLOCKS, dim=1)[:, :blocks].reshape(q.scale.shape)
    return MXFP8Tensor(data, scale.view(SCALE_DTYPE), "row", "1x128")


class _Expert(NamedTuple):
    """A matrix whose rows are contracted: numbers to be quantised, or E4M3 with the bytes of its scales."""

    data: Tensor
    exponents: Tensor | None

    def rows(self, part: slice) -> tuple[Tensor, Tensor]:
        if self.exponents is None:
            return quantize_rows(self.data[part], BLOCK)
        return self.data[part], self.exponents[part]


def _check(w: Any, axis: str) -> None:
    if isinstance(w, MXFP8Tensor):
        if w.axis != axis:
            raise ValueError(f"{OP}: w is quantised along its {w.axis}; axis {axis!r} needs a copy along that")
        _check_shape(w.data, 3)
        return
    if not isinstance(w, (Tensor, list, tuple)) or (not isinstance(w, Tensor) and not w):
        raise TypeError(
            f"{OP}: w is {type(w).__name__}; give a tensor [E, N, K], a list of E of [N, K], or MXFP8Tensor"
        )
    is_packed = isinstance(w, Tensor)
    for matrix in [w] if is_packed else w:
        if not isinstance(matrix, Tensor) or matrix.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            got = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise TypeError(f"{OP}: w holds {got}; give torch.bfloat16, torch.float16 or torch.float32")
        _check_shape(matrix, 3 if is_packed else 2)
        if not is_packed and (matrix.shape, matrix.device) != (w[0].shape, w[0].device):
            raise ValueError(f"{OP}: w holds experts of different shapes or devices; all experts have one")


def _experts(w: Any, axis: str) -> list[_Expert]:
    if isinstance(w, MXFP8Tensor):
        scales = w.plain().scale.view(torch.uint8)
        pairs = [(d, s) if axis == "row" else (d.mT, s.mT) for d, s in zip(w.data, scales, strict=True)]
        return [_Expert(d, s) for d, s in pairs]
    return [_Expert(matrix.detach() if axis == "row" else matrix.detach().mT, None) for matrix in w]


def _check_shape(matrix: Tensor, rank: int) -> None:
    if matrix.dim() != rank or not all(matrix.shape) or matrix.shape[-1] % BLOCK or matrix.shape[-2] % BLOCK:
        wanted = "[E, N, K]" if rank == 3 else "[N, K]"
        raise ValueError(
            f"{OP}: w has shape {shape_text(matrix.shape)}; it must be {wanted}, N and K multiples of {BLOCK}, so pad "
            "them with zeros"
        )


class _Tally:
    """Sums up what the fold of one expert after the other changed."""

    def __init__(self, device: torch.device) -> None:
        self.binades = torch.zeros(MAX_BINADES, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # changed, not zero
        self.row_error = torch.zeros((), device=device)
        self.block_errors: list[Tensor] = []  # of each chunk: the largest, where, and how far that block moved
        self.places: list[tuple[int, int, int]] = []  # of each chunk: expert, first row, blocks of a row
        self.finite: dict[int, Tensor] = {}  # of each expert

    def add_finite(self, expert: int, is_finite: Tensor) -> None:
        self.finite[expert] = is_finite & self.finite[expert] if expert in self.finite else is_finite

    def add(self, place: tuple[int, int, int], folded: Tensor, rounded: Tensor, drop: Tensor) -> None:
        """`folded`, `rounded` [R, blocks, 32]: values before and after rounding. `drop` [R, blocks]: binades moved."""
        lost = folded - rounded
        is_zero = folded.eq(0).all(dim=2)
        steps = drop.clamp(0, MAX_BINADES - 1)[~is_zero]
        self.binades += torch.bincount(steps, minlength=MAX_BINADES)
        self.counts += torch.stack([lost.count_nonzero(), folded.count_nonzero()])
        lost_norms, norms = lost.square().sum(dim=2), folded.square().sum(dim=2)
        row_errors = lost_norms.sum(dim=1) / norms.sum(dim=1)
        self.row_error = torch.maximum(self.row_error, row_errors.nan_to_num(0).amax().sqrt())
        errors = (lost_norms / norms).masked_fill(is_zero | (drop > NEGLIGIBLE_BINADES), 0).sqrt()
        worst, where = errors.flatten().max(dim=0)
        self.block_errors.append(torch.stack([n.double() for n in (worst, where, drop.flatten()[where])]))
        self.places.append(place)

    def report(self) -> FoldReport:
        errors, where, drops = torch.stack(self.block_errors).cpu().unbind(1)
        chunk = int(errors.argmax())
        expert, first, blocks = self.places[chunk]
        row, block = divmod(int(where[chunk]), blocks)
        changed, total = self.counts.tolist()
        return FoldReport(
            binades=tuple(self.binades.tolist()),
            changed=changed / max(total, 1),
            error=float(self.row_error),
            error_bound=float(errors[chunk]),
            worst=Place(expert, first + row, block, int(drops[chunk])),
        )


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _empty(w: Any, axis: str) -> FoldedWeight:
    experts = w.data if isinstance(w, MXFP8Tensor) else w
    rows, columns = experts.shape[1:] if isinstance(experts, Tensor) else experts[0].shape
    shape = (len(experts), rows, columns) if axis == "row" else (len(experts), columns, rows)
    device = (experts if isinstance(experts, Tensor) else experts[0]).device
    data = torch.empty(shape, dtype=DATA_DTYPE, device=device)
    return FoldedWeight(data, torch.empty(shape[:2], dtype=SCALE_DTYPE, device=device), axis, None)


def _fold_by_kernel(w: Any, out: FoldedWeight) -> None:
    """w [E, N, K] or a list of [N, K]; bit for bit what `_fold_by_torch` makes of finite weights."""
    data, scale, index = out.data, out.scale, out.data.get_device()
    arch = gpus.gpu(index).arch
    pieces: list[tuple[Tensor, Tensor, Tensor]]
    if isinstance(w, Tensor) and _is_readable(w):
        pieces = [(w.detach(), data, scale)]
    else:
        experts = [matrix.detach() for matrix in w]
        whole = [m if _is_readable(m) else m.clone(memory_format=torch.contiguous_format) for m in experts]
        pieces = [(m[None], d[None], s) for m, d, s in zip(whole, data, scale, strict=True)]
    spec = FoldMxfp8Spec(str(pieces[0][0].dtype).removeprefix("torch."), out.axis, arch)
    fold, pack = kernels.find(spec).function, signature_of(spec).pack
    with contextlib.nullcontext() if gpus.is_only_one() else torch.cuda.device(index):
        for source, its_data, its_scale in pieces:
            matrices = (source, its_data) if out.axis == "col" else (source.flatten(0, 1), its_data.flatten(0, 1))
            fold(*pack(w=matrices[0], data=matrices[1], scale=its_scale.data_ptr()))


def _is_readable(w: Tensor) -> bool:
    """Whether a kernel can read it where it lies."""
    return w.is_contiguous() and w.data_ptr() % VECTOR_BYTES == 0


def _fold_by_torch(experts: list[_Expert], out: FoldedWeight | None, report: bool) -> _Tally | None:
    """Writes `out`, where there is one; sums up what changed, where it is asked for."""
    first = experts[0].data
    tally = _Tally(first.device) if report else None
    scale = None if out is None else out.scale.view(torch.uint8)
    for index, expert in enumerate(experts):
        for part in _chunks(*first.shape):
            elements, exponents = expert.rows(part)
            blocks = elements.float().unflatten(1, (-1, BLOCK))
            folded, target, drop = _rebased(blocks, exponents)
            rounded = to_e4m3(folded)
            if out is not None and scale is not None:
                out.data[index, part], scale[index, part] = rounded.flatten(1), target
            if tally is not None:
                tally.add_finite(index, (exponents < E8M0_INF).all() & blocks.isfinite().all())
                tally.add((index, part.start, blocks.shape[1]), folded, rounded.float(), drop)
    return tally


def _checked(tally: _Tally, max_error: float) -> FoldReport:
    """The report, if nothing in it is to be refused."""
    _refuse_infinite(tally.finite)
    report = tally.report()
    if report.error_bound > max_error:
        _refuse(report, max_error)
    return report


def _rebased(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Elements [R, blocks, 32] on one scale a row; that scale's byte [R]; and by how many binades each block moved.

    The row's scale is the least that keeps its largest element at 448 or under. Exact: nothing is rounded yet.
    """
    mantissa, power = torch.frexp(blocks.abs().amax(dim=2))
    excess = power - E4M3_MAX_EXPONENT + (mantissa > E4M3_MAX_MANTISSA)
    exponents = exponents.to(torch.int32)
    needed = torch.where(mantissa > 0, exponents + excess, 0)
    target = needed.amax(dim=1).clamp(0, E8M0_NAN - 1)
    shift = exponents - target[:, None]
    factor = ((shift.clamp(LOST, -LOST) + 127) << F32_MANTISSA_BITS).view(torch.float32)
    return blocks * factor[:, :, None], target.to(torch.uint8), -shift


def _refuse_infinite(finite: dict[int, Tensor]) -> None:
    flags = torch.stack(list(finite.values())).tolist()
    if not all(flags):
        raise FoldError(f"{OP}: expert {flags.index(False)} has a NaN or an Inf among its weights; mend the checkpoint")


def _refuse(report: FoldReport, max_error: float) -> None:
    at = report.worst
    first = at.block * BLOCK
    raise FoldError(
        f"{OP}: expert {at.expert}: folding would change {report.error_bound:.1e} of a block's norm, more than "
        f"max_error = {max_error:g}: row {at.row}, elements {first} to {first + BLOCK - 1} of the "
        f"contraction lie {at.binades} binades under the row's maximum; use recipe 'mxfp8_exact', which keeps every "
        "block's scale, or raise max_error"
    )
