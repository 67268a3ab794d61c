"""Folding: convert a weight in MXFP8, which has a scale for each 32 elements, to one scale (a power of two) a row.

Hopper's tensor cores do not support block scales. E4M3 is a floating-point format, so a power of two can move from a
scale into the elements. This is exact down to the spacing of E4M3's subnormals: docs/mxfp8.md has the bounds and the
reasons.

On a GPU a kernel folds. On the CPU torch's operators fold; they are the kernel's reference, and they also measure the
numbers of a FoldReport, for weights on a GPU too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels.chains import signature_of
from cute_kernels.specs import FoldMxfp8Spec
from ffi_bridge import profiles

from ...calls.checks import check_choice, check_flag, check_number, check_plain, runs_kernels, shape_text
from ...calls.memory import readable
from ...choose import kernels
from ...choose.problem import dtype_name
from ...errors import UnsupportedDevice
from ...host import device as gpus
from ...names import Axes, Axis
from ..scaled import BLOCK, E8M0_INF, E8M0_NAN, F32_MANTISSA_BITS, SCALE_DTYPE, SOURCE_DTYPES, Scaled, scales_of
from .layout import AXES, BLOCK_SIZES, DATA_DTYPE
from .reference import quantize_rows, to_e4m3
from .tensor import MXFP8Tensor

OP = "prepare_mxfp8_weight"
FOLDED = "mxfp8 folded by "
"""The `Form.name` of folded weights is this text and the axis, "row" or "col"."""
MAX_ERROR = 1e-2
"""Largest change of a block that is accepted by default, relative to its norm. Quantising to MXFP8 makes 2.6e-2."""
WIDE = BLOCK_SIZES["1x128"]
WIDE_BLOCKS = WIDE // BLOCK
MAX_BINADES = 32
NEGLIGIBLE_BINADES = 24
"""A block this many binades (powers of two) below its row's maximum is below the precision of the row's float32 sum."""
CHUNK_ELEMENTS = 1 << 24
"""Elements that are converted together: 64 MB in float32, and a few times 64 MB for intermediate results."""
E4M3_MAX_MANTISSA, E4M3_MAX_EXPONENT = 0.875, 9  # 448 = 0.875 * 2^9
LOST = -40
"""Any E4M3 number times 2^LOST rounds to 0."""

Weight = Tensor | MXFP8Tensor | Sequence[Tensor]


class FoldError(ValueError):
    """Raised when a weight cannot be prepared for FP8 GEMMs; the message names the expert, and the remedy.

    Causes: folding would change the weight too much; or the block scales of a row of an MXFP4 weight are too far apart;
    or the weight has a NaN or an Inf.
    """


class Place(NamedTuple):
    """The place of a block of 32 elements in expert weights, and how far folding moved it.

    Attributes:
        expert, row: the expert and the row.
        block: number of the block along the contraction.
        binades: number of powers of two by which folding moved the block's elements down.
    """

    expert: int
    row: int
    block: int
    binades: int


class FoldReport(NamedTuple):
    """Measurement of the changes that folding made to a weight in MXFP8.

    Attributes:
        binades: entry i is the number of blocks of 32 whose elements folding moved down by i powers of two; the last
            entry counts blocks that were moved by this much or more. Blocks of zeros are not counted.
        changed: share of the nonzero elements whose value changed.
        error: the largest ratio of the norm of a row's change to the row's norm.
        error_bound: the largest ratio of the norm of a block's change to the block's norm, for blocks of 32. For any
            activations x, no result changes by more than this share of the sum over blocks b of |w_b| |x_b|. Blocks
            below 2^-24 of their row's maximum are left out.
        worst: the block with the ratio `error_bound`.
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
class FoldedWeight(Scaled):
    """Expert weights as the FP8 GEMMs read them, with one power of two a row; made by `prepare_mxfp8_weight`.

    Instances can be copied and pickled, and pass torch.load(weights_only=True).

    Attributes:
        data: [E, R, C] float8_e4m3fn, contiguous. C is the dimension over which a GEMM contracts, since FP8 wgmma reads
            operands along the contraction. Axis "row", for the forward: [E, N, K]. Axis "col", for the data gradient:
            [E, K, N], transposed.
        scale: [E, R] float8_e8m0fnu, one power of two for each row of data.
        axis: "row" or "col".
        report: measurement of the changes that folding made. None: not measured.

    Raises:
        ValueError, TypeError: data and scale do not fit together.
    """

    data: Tensor
    scale: Tensor
    axis: str
    report: FoldReport | None

    def __post_init__(self) -> None:
        check_choice("FoldedWeight", "axis", self.axis, AXES)
        self.check_parts()
        shape = tuple(self.data.shape)
        if len(shape) != 3 or tuple(self.scale.shape) != shape[:2]:
            raise ValueError(
                f"FoldedWeight: data has shape {shape_text(shape)} and scale {shape_text(self.scale.shape)}; they must "
                "be [E, R, C] and [E, R]"
            )

    def form_name(self) -> str:
        return FOLDED + self.axis

    def in_16_bits(self, name: str) -> str:
        return "an MXFP8Tensor [E, N, K] or the 16-bit weight"

    def dequantize(self) -> Tensor:
        """Return the values [E, N, K], float32."""
        values = self.data.float() * scales_of(self.scale.view(torch.uint8))[..., None]
        return values if self.axis == "row" else values.mT.contiguous()

    @classmethod
    def form_of_json(cls, form: list[Any]) -> tuple[Any, ...]:
        axis, report = form
        if report is None:
            return axis, None
        binades, changed, error, error_bound, worst = report
        return axis, FoldReport(tuple(binades), changed, error, error_bound, Place(*worst))


class FoldedWeights(NamedTuple):
    """A weight in two folded copies, for training: `row` for the forward, `col` for the data gradient."""

    row: FoldedWeight
    col: FoldedWeight


torch.serialization.add_safe_globals([FoldedWeights, FoldReport, Place])


@overload
def prepare_mxfp8_weight(
    w: Weight, *, axis: Axis = "row", max_error: float = MAX_ERROR, report: bool = True
) -> FoldedWeight: ...
@overload
def prepare_mxfp8_weight(
    w: Weight, *, axis: Literal["both"], max_error: float = MAX_ERROR, report: bool = True
) -> FoldedWeights: ...
def prepare_mxfp8_weight(
    w: Weight, *, axis: Axes = "row", max_error: float = MAX_ERROR, report: bool = True
) -> FoldedWeight | FoldedWeights:
    """Quantise expert weights to MXFP8, and fold the scales to one power of two for each row.

    Folding moves the scale of each block of 32 elements into the elements, since Hopper's FP8 MMAs do not support block
    scales. Call this function once at load, or after each training step. On a GPU one launch quantises and folds a
    packed weight along one axis; a list takes a launch for each expert. The report uses torch's operators and takes
    many times as long.

    Args:
        w: [E, N, K], or a list of E tensors [N, K]: bfloat16, float16 or float32. Or an MXFP8Tensor [E, N, K] with the
            wanted axis. N and K are multiples of 32.
        axis: the contraction: "row", along K, for y = x w^T; "col", along N, for the data gradient dx = dy w; "both".
        max_error: the largest `FoldReport.error_bound` to accept.
        report: True: measure the changes, and compare them with max_error. False: make no report. Then nothing is read
            back from a GPU, and no weight is refused: a row with a NaN or an Inf has a NaN in its data, or the scale
            2^127. Weights on the meta device get no report.

    Returns:
        FoldedWeight on w's device, or FoldedWeights (row, col) for "both".

    Raises:
        FoldError (a ValueError): folding would change an expert by more than max_error, or an expert has a NaN or Inf.
        ValueError, TypeError: an argument does not fit.
        UnsupportedDevice, BundleError (RuntimeErrors): w is on a GPU, but there is no kernel for it.
    """
    check_choice(OP, "axis", axis, (*AXES, "both"))
    check_number(OP, "max_error", max_error)
    check_flag(OP, "report", report)
    if not max_error >= 0:
        raise ValueError(f"{OP}: max_error is {max_error!r}; give a number of at least 0")
    if axis == "both":
        return FoldedWeights(*(prepare_mxfp8_weight(w, axis=one, max_error=max_error, report=report) for one in AXES))
    pieces = _pieces(w, axis)
    report = report and not pieces[0].is_meta
    with torch.no_grad():
        folded = _empty(pieces, axis)
        by_kernel = not isinstance(w, MXFP8Tensor) and runs_kernels(folded.data)
        if by_kernel:
            _fold_by_kernel(pieces, folded)
        if by_kernel and not report:
            return folded
        exponents = w.plain().scale.view(torch.uint8) if isinstance(w, MXFP8Tensor) else None
        changes = _fold_by_torch(pieces, exponents, axis, None if by_kernel else folded, report)
        return dataclasses.replace(folded, report=_report(changes, max_error)) if report else folded


def rebase_mxfp8(q: MXFP8Tensor) -> MXFP8Tensor:
    """Convert a tensor with block "1x32" to block "1x128", with which FP8 GEMMs read activations.

    The four scales of each 128 elements of a row are folded into one scale. Values do not change, except for elements
    below 2^-17.8 of the maximum of their 128 elements. A NaN in one of the four scales makes all four NaN.

    Args:
        q: a tensor quantised by rows, with plain scales. If its block is "1x128" already, it is returned unchanged.

    Raises:
        ValueError: q has another axis or scale layout.
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


def _pieces(w: Any, axis: str) -> list[Tensor]:
    """Check a weight, and return it as a list of tensors: one [E, N, K] if it is packed, else E of [1, N, K].

    Raises:
        TypeError, ValueError: w is not a weight that can be folded along `axis`.
    """
    is_list = isinstance(w, (list, tuple)) and len(w) > 0
    if not is_list and not isinstance(w, (Tensor, MXFP8Tensor)):
        raise TypeError(
            f"{OP}: w is {type(w).__name__}; give a tensor [E, N, K], a list of E of [N, K], or MXFP8Tensor"
        )
    if isinstance(w, MXFP8Tensor) and w.axis != axis:
        raise ValueError(f"{OP}: w is quantised along its {w.axis}; axis {axis!r} needs a copy along that")
    matrices = list(w) if is_list else [w.data if isinstance(w, MXFP8Tensor) else w]
    valid = (DATA_DTYPE,) if isinstance(w, MXFP8Tensor) else SOURCE_DTYPES
    for matrix in matrices:
        if not isinstance(matrix, Tensor) or matrix.dtype not in valid:
            got = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise TypeError(f"{OP}: w holds {got}; give torch.bfloat16, torch.float16 or torch.float32")
        if matrix.dim() != (2 if is_list else 3) or not all(matrix.shape) or any(n % BLOCK for n in matrix.shape[-2:]):
            raise ValueError(
                f"{OP}: w has shape {shape_text(matrix.shape)}; it must be {'[N, K]' if is_list else '[E, N, K]'}, N "
                f"and K multiples of {BLOCK}, so pad them with zeros"
            )
        if (matrix.shape, matrix.device) != (matrices[0].shape, matrices[0].device):
            raise ValueError(f"{OP}: w holds experts of different shapes or devices; all experts have one")
        check_plain(OP, "w", matrix)
    if isinstance(w, MXFP8Tensor):
        check_plain(OP, "w", w.scale)
    return [matrix.detach()[None] if is_list else matrix.detach() for matrix in matrices]


def _empty(pieces: list[Tensor], axis: str) -> FoldedWeight:
    rows, columns = pieces[0].shape[1:] if axis == "row" else pieces[0].mT.shape[1:]
    data = torch.empty(sum(map(len, pieces)), rows, columns, dtype=DATA_DTYPE, device=pieces[0].device)
    return FoldedWeight(data, torch.empty(data.shape[:2], dtype=SCALE_DTYPE, device=data.device), axis, None)


@functools.cache
def _ships(spec: FoldMxfp8Spec) -> bool:
    return profiles.profile_of(spec.arch, spec.name) is not None


def _fold_by_kernel(pieces: list[Tensor], out: FoldedWeight) -> None:
    """Fold by the kernel, into `out`. For finite weights the result equals that of `_fold_by_torch` bit for bit."""
    index, first = out.data.get_device(), 0
    spec = FoldMxfp8Spec(dtype_name(pieces[0].dtype), out.axis, gpus.gpu(index).arch)
    if not _ships(spec):
        raise UnsupportedDevice(
            f"recipe 'mxfp8' needs an FP8 MMA, which the {spec.arch} kernels that serve cuda:{index} have not; choose "
            "recipe='mxfp8_weight_only', 'mxfp8_exact' or 'bf16'"
        )
    fold, pack = kernels.find(spec).function, signature_of(spec).pack
    with gpus.on(index):
        for w in readable(pieces):
            experts = slice(first, first + len(w))
            data, scale, first = out.data[experts], out.scale[experts], experts.stop
            matrices = (w, data) if out.axis == "col" else (w.flatten(0, 1), data.flatten(0, 1))
            fold(*pack(w=matrices[0], data=matrices[1], scale=scale.data_ptr()))


class _Change(NamedTuple):
    """Changes that folding made to one chunk of rows of one expert. A chunk is the rows that are converted together.

    Attributes:
        expert: the expert's number.
        first_row: number of the chunk's first row.
        blocks: number of blocks in a row.
        numbers: the changes as `_measured` returns them, still on the device.
    """

    expert: int
    first_row: int
    blocks: int
    numbers: Tensor


def _fold_by_torch(
    pieces: list[Tensor], exponents: Tensor | None, axis: str, out: FoldedWeight | None, report: bool
) -> list[_Change]:
    """Fold by torch's operators, in chunks of rows.

    Args:
        pieces: the weight as one tensor [E, N, K] in a list, or as E tensors [1, N, K].
        exponents: E8M0 bytes of the scales if the weight is in MXFP8. None: the weight is quantised first.
        axis: "row" or "col".
        out: buffers for the result. None: only measure changes.
        report: True: measure changes.

    Returns:
        The changes of each chunk of rows; [] without `report`.
    """
    changes = []
    scale = None if out is None else out.scale.view(torch.uint8)
    for expert, matrix in enumerate(matrix for piece in pieces for matrix in piece):
        its_exponents = None if exponents is None else exponents[expert]
        if axis == "col":
            matrix, its_exponents = matrix.mT, None if its_exponents is None else its_exponents.mT
        step = max(1, CHUNK_ELEMENTS // matrix.shape[1])
        for first in range(0, len(matrix), step):
            rows = slice(first, first + step)
            if its_exponents is None:
                elements, powers = quantize_rows(matrix[rows], BLOCK)
            else:
                elements, powers = matrix[rows], its_exponents[rows]
            blocks = elements.float().unflatten(1, (-1, BLOCK))
            folded, target, drop = _rebased(blocks, powers)
            rounded = to_e4m3(folded)
            if out is not None and scale is not None:
                out.data[expert, rows], scale[expert, rows] = rounded.flatten(1), target
            if report:
                is_finite = (powers < E8M0_INF).all() & blocks.isfinite().all()
                numbers = _measured(folded, rounded.float(), drop, is_finite)
                changes.append(_Change(expert, first, blocks.shape[1], numbers))
    return changes


def _rebased(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert the elements of each row to one scale: the least scale with which no element exceeds 448.

    Args:
        blocks: elements [R, blocks, 32], float32.
        exponents: E8M0 bytes of the blocks' scales [R, blocks].

    Returns:
        (elements, scales, drops): the elements [R, blocks, 32] for the new scale, exact, since nothing is rounded yet;
        the E8M0 byte of each row's scale [R]; the binades (powers of two) by which each block was moved down
        [R, blocks].
    """
    mantissa, power = torch.frexp(blocks.abs().amax(dim=2))
    excess = power - E4M3_MAX_EXPONENT + (mantissa > E4M3_MAX_MANTISSA)
    exponents = exponents.to(torch.int32)
    needed = torch.where(mantissa > 0, exponents + excess, 0)
    target = needed.amax(dim=1).clamp(0, E8M0_NAN - 1)
    shift = exponents - target[:, None]
    factor = ((shift.clamp(LOST, -LOST) + 127) << F32_MANTISSA_BITS).view(torch.float32)
    return blocks * factor[:, :, None], target.to(torch.uint8), -shift


def _measured(folded: Tensor, rounded: Tensor, drop: Tensor, is_finite: Tensor) -> Tensor:
    """Measure the changes that rounding makes to some rows, for a FoldReport.

    Args:
        folded, rounded: [R, blocks, 32], values before and after rounding.
        drop: [R, blocks], binades by which blocks were moved down.
        is_finite: bool [], True: all values were finite.

    Returns:
        float64 on the device, so that all chunks are read back at once. First seven numbers: is_finite, changed
        elements, nonzero elements, largest row error, largest block error, the place of that block, and its drop. Then
        the counts of blocks that were moved by 0, 1, ... binades.
    """
    lost = folded - rounded
    is_zero = folded.eq(0).all(dim=2)
    lost_norms, norms = lost.square().sum(dim=2), folded.square().sum(dim=2)
    row_error = (lost_norms.sum(dim=1) / norms.sum(dim=1)).nan_to_num(0).amax().sqrt()
    errors = (lost_norms / norms).masked_fill(is_zero | (drop > NEGLIGIBLE_BINADES), 0).sqrt().flatten()
    worst, place = errors.max(dim=0)
    changed = lost.count_nonzero(), folded.count_nonzero()
    numbers = (is_finite, *changed, row_error, worst, place, drop.flatten()[place])
    binades = torch.bincount(drop.clamp(0, MAX_BINADES - 1)[~is_zero], minlength=MAX_BINADES)
    return torch.cat([torch.stack([number.double() for number in numbers]), binades.double()])


def _report(changes: list[_Change], max_error: float) -> FoldReport:
    """Combine the changes of all chunks to a FoldReport, and raise FoldError if a change is too large.

    Args:
        changes: the measured changes of all chunks of rows.
        max_error: the largest change that is allowed in a block, relative to the block's norm.

    Raises:
        FoldError: a weight is not finite, or a block changes by more than `max_error`.
    """
    numbers = torch.stack([change.numbers for change in changes]).cpu()
    finite, changed, nonzero, row_errors, errors, places, drops = numbers[:, :-MAX_BINADES].unbind(1)
    if not finite.all():
        expert = changes[finite.tolist().index(0)].expert
        raise FoldError(f"{OP}: expert {expert} has a NaN or an Inf among its weights; mend the checkpoint")
    worst = int(errors.argmax())
    row, block = divmod(int(places[worst]), changes[worst].blocks)
    report = FoldReport(
        binades=tuple(numbers[:, -MAX_BINADES:].sum(dim=0).long().tolist()),
        changed=float(changed.sum() / nonzero.sum().clamp(min=1)),
        error=float(row_errors.max()),
        error_bound=float(errors[worst]),
        worst=Place(changes[worst].expert, changes[worst].first_row + row, block, int(drops[worst])),
    )
    if report.error_bound > max_error:
        first = block * BLOCK
        raise FoldError(
            f"{OP}: expert {report.worst.expert}: folding would change {report.error_bound:.1e} of a block's norm, "
            f"more than max_error = {max_error:g}: row {report.worst.row}, elements {first} to {first + BLOCK - 1} of "
            f"the contraction lie {report.worst.binades} binades under the row's maximum; use recipe 'mxfp8_exact', "
            "which keeps every block's scale, or raise max_error"
        )
    return report
