"""mhc.boundary kernels with x in MXFP8, in the emulator: the quantiser's bytes, poisoned outputs, races."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulator import validated
from emulator.emulated_gpu import installed
from support.boundary import given, of_all_kinds, update_removed
from support.fake_gpu import reference
from torch import Tensor

import glulam
from cute_kernels.specs import MhcSpec
from glulam import mhc
from glulam.validate.guards import Guards

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [(1, 32), (3, 96), (17, 160), (2, 1184)]
"""Scales of a row: 1, 3 and 5, stored one by one, and 37; 1184 columns are more than 128 threads have at once."""
OTHERS = ("streams", "pre", "post", "comb")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(arguments: list[Any], arch: str = "sm_90a", **options: Any) -> None:
    """Compare an MXFP8 call with the 16-bit call, and its x with the quantised x of that call."""
    with installed(arch, check_races=True), torch.no_grad():
        plain = mhc.boundary(*arguments)
        made = mhc.boundary(*arguments, **options)
        with reference():
            wanted = glulam.quantize_mxfp8(plain.x, block=options["x_block"])
    assert same_bytes(made.x_mxfp8.data, wanted.data) and same_bytes(made.x_mxfp8.scale, wanted.scale)
    assert all(same_bytes(getattr(made, name), getattr(plain, name)) for name in OTHERS)
    assert (made.x is not None) == options.get("return_x", False)
    assert made.x is None or same_bytes(made.x, plain.x)


@pytest.mark.parametrize("return_x", [False, True])
@pytest.mark.parametrize("block", ["1x32", "1x128"])
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_x_has_the_bytes_of_its_quantisation(tokens: int, width: int, block: str, return_x: bool) -> None:
    arguments = of_all_kinds(width, BF16, tokens) if tokens > 2 else given((tokens,), width, dtype=F32, streams=BF16)
    check(arguments if return_x else update_removed(arguments), x_block=block, return_x=return_x)


def test_lanes_after_the_last_column_count_as_zeros() -> None:
    """They have the last vector's weights, and 0 times an infinite one would make the last block NaN."""
    arguments = given((3,), 160, dtype=F32, streams=BF16)
    arguments[8][-1] = torch.inf
    check(arguments, x_block="1x128")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_portable_kernels(arch: str) -> None:
    """On sm_80 elements are rounded in integer arithmetic, and magnitudes compared as floats."""
    check(of_all_kinds(160, BF16, 3), arch, x_block="1x128")


@pytest.mark.emulator
@pytest.mark.parametrize("block", ["1x32", "1x128"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_float16(arch: str, block: str) -> None:
    check(of_all_kinds(288, F16, 19), arch, x_block=block, return_x=True)


@pytest.mark.emulator
@pytest.mark.parametrize("width", [5120, 7168])
def test_widths_of_models(width: int) -> None:
    check(given((1,), width, dtype=F32, streams=BF16), x_block="1x128")


def test_every_byte_of_the_results_is_written_and_none_beside() -> None:
    """New tensors and the workspace hold NaN, and lie between canaries; the last row's scales end within a word."""
    for options in ({"x_block": "1x32"}, {"x_block": "1x128", "return_x": True}):
        with Guards() as guards:
            check(given((3,), 160, dtype=F32, streams=BF16), **options)
        assert not guards.complaint()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trials_of_validation(dtype: str) -> None:
    """Two of 16-bit x, with parameters in float32 and in 16 bits, and one of each block."""
    with installed("sm_90a") as gpu:
        size = validated.SMALL._replace(streams=(((3,), 40),))
        assert validated.try_function(gpu, MhcSpec("boundary", dtype), size).trials == 4


def test_a_token_has_the_same_bytes_in_every_batch() -> None:
    """With columns cut into wide slices and into slices of one block."""
    arguments = given((70,), 736, dtype=F32, streams=BF16)
    cuts = []
    with installed("sm_90a") as gpu, torch.no_grad():
        wanted = mhc.boundary(*arguments, x_block="1x128").x_mxfp8
        for tokens in (70, 1):
            some = [one[:tokens].clone() if place < 5 else one for place, one in enumerate(arguments)]
            made = mhc.boundary(*some, x_block="1x128").x_mxfp8
            cuts.append(gpu.fake.launches[-1]["merge"])
            assert same_bytes(made.data, wanted.data[:tokens]) and same_bytes(made.scale, wanted.scale[:tokens])
    assert cuts == [1, 8]


def test_no_tokens_launch_nothing() -> None:
    with installed("sm_90a") as gpu, torch.no_grad():
        made = mhc.boundary(*given((0,), 96, dtype=F32, streams=BF16), x_block="1x32")
        assert not gpu.called and made.x_mxfp8.shape == (0, 96) and made.x_mxfp8.scale.shape == (0, 3)
