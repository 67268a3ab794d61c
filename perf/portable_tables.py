"""Tables of the portable suite, as parts of `tables.Table`: title, header, rows."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .fp8_tables import WEIGHT_BITS, Parts, ratio
from .targets import BF16, MMA_ALONE, NATIVE, PORTABLE, PORTABLE_MXFP8, TORCH, portable_targets


def _us(record: dict[str, Any], name: str) -> float:
    return float(record["times"][name]["median_us"])


def _of_mma(record: dict[str, Any]) -> float:
    """Of the FLOP a second that MMAs reach which do nothing else."""
    flop = Case(**record["case"]).flop("mlp")
    return flop / _us(record, PORTABLE) / (record["mma_flop"] / _us(record, MMA_ALONE))


def _of_copy(record: dict[str, Any], copy_tbps: float) -> float:
    """Of a device copy's bytes a second."""
    moved = Case(**record["case"]).bytes("mlp", record["active_experts"], WEIGHT_BITS[BF16])
    return moved / _us(record, PORTABLE) * 1e-6 / copy_tbps


def reached(record: dict[str, Any], copy_tbps: float) -> dict[str, float]:
    """What a case reaches, by what it is measured by."""
    if not Case(**record["case"]).decode:
        return {MMA_ALONE: _of_mma(record)}
    of_itself = ratio(record, PORTABLE_MXFP8, PORTABLE)
    return {"device copy": _of_copy(record, copy_tbps), PORTABLE_MXFP8: of_itself or 0.0}


def _row(record: dict[str, Any], copy_tbps: float) -> tuple[str, ...]:
    found = reached(record, copy_tbps)
    peers = (ratio(record, PORTABLE, peer) for peer in (NATIVE, TORCH))
    shares = (found.get(name) for name in (MMA_ALONE, "device copy", PORTABLE_MXFP8))
    cells = ("-" if value is None else f"{value:.2f}" for value in (*peers, *shares))
    return Case(**record["case"]).label, f"{_us(record, PORTABLE):.1f}", *cells


def portable_parts(records: list[dict[str, Any]], copy_tbps: float) -> list[Parts]:
    """Every case, then what is below what is aimed at, if any."""
    title = (
        "The MLP on portable kernels (cp.async, mma.sync) compiled for Hopper: the time of Hopper's own kernels and of "
        "torch over theirs, their share of what mma.sync reaches alone and of a device copy's rate, and their time in "
        "16 bits over that with weights in MXFP8"
    )
    header = ("case", "us", NATIVE, TORCH, f"of {MMA_ALONE}", "of a copy", "weights in MXFP8")
    missed: list[tuple[str, ...]] = [
        (record["case"]["name"], name, f"{value:.3f}", f"{wanted:.2f}")
        for record in records
        for name, value in reached(record, copy_tbps).items()
        if (wanted := portable_targets(record["case"]["name"]).get(name)) is not None and value < wanted
    ]
    parts: list[Parts] = [(title, header, [_row(record, copy_tbps) for record in records])]
    return [*parts, ("Below the target", ("case", "of", "ratio", "target"), missed)] if missed else parts
