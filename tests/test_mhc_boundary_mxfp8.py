"""mhc.boundary with x in MXFP8 on the CPU: the quantiser's bytes, errors, traces, and layers that read x."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import mxfp8
from support.boundary import given, of_all_kinds, update_removed
from support.criterion import same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import glulam
from glulam import MXFP8Tensor, mhc
from glulam.errors import GradientNotSupported
from glulam.nn import HyperConnection, HyperStreams

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = {"1x32": 32, "1x128": 128}
each_block = pytest.mark.parametrize("block", BLOCKS)


def data_and_scales(tensor: MXFP8Tensor) -> tuple[Tensor, Tensor]:
    return tensor.data.view(torch.uint8), tensor.scale.view(torch.uint8)


@each_block
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (1, 2, 3), (0,), (0, 3)])
def test_x_has_the_bytes_of_its_quantisation(lead: tuple[int, ...], dtype: torch.dtype, block: Any) -> None:
    """By the public quantiser, and by the tests' own in float64. Other results are those of a call in 16 bits."""
    arguments = given(lead, 160, dtype=F32, streams=dtype)
    plain = mhc.boundary(*arguments)
    made = mhc.boundary(*arguments, x_block=block)
    both = mhc.boundary(*arguments, x_block=block, return_x=True)
    assert made.x is None and both.x is not None and same_bits(both.x, plain.x)
    x = plain.x.reshape(-1, 160)
    own, public = mxfp8.quantized(x, "row", BLOCKS[block]), glulam.quantize_mxfp8(x, block=block)
    for one in (made.x_mxfp8, both.x_mxfp8):
        assert (one.axis, one.block, one.scale_layout) == ("row", block, "plain")
        assert one.shape == plain.x.shape and one.scale.shape == (*lead, 5)
        for part, wanted, other in zip(data_and_scales(one), own[:2], data_and_scales(public), strict=True):
            assert torch.equal(part.view(other.shape), other) and torch.equal(part.view(wanted.shape), wanted)
    for name in ("streams", "pre", "post", "comb"):
        assert same_bits(getattr(made, name), getattr(plain, name))


@each_block
def test_nan_inf_and_zeros(block: Any) -> None:
    """A NaN makes its token NaN, an Inf its block and the token's others zeros, one in norm_weight its block."""
    made = mhc.boundary(*of_all_kinds(160, BF16), x_block=block).x_mxfp8
    data, scales = data_and_scales(made)
    of_norm = torch.arange(5) * 32 < BLOCKS[block]
    assert bool((scales[0] == 0xFF).all()) and bool((data[0] == 0x7F).all())
    for token, is_nan in ((1, of_norm | (torch.arange(5) == 4)), (2, of_norm)):
        assert torch.equal(scales[token], torch.where(is_nan, 0xFF, 0).to(torch.uint8))
        magnitudes = data[token] & 0x7F
        assert torch.equal(magnitudes, torch.where(is_nan, 0x7F, 0).to(torch.uint8).repeat_interleave(32))
    assert torch.equal(scales[3:] == 0xFF, of_norm.expand(4, 5)) and data[3:, 128:].any()


@each_block
def test_a_layer_reads_x(block: Any) -> None:
    """`moe` and `grouped_mlp` take what the boundary returns; by "1x128" with the result of 16-bit x, to the bit."""
    arguments = given((6,), 128, dtype=F32, streams=BF16)
    made = mhc.boundary(*arguments, x_block=block, return_x=True)
    assert made.x is not None
    w1, w2 = (torch.randn(2, *shape).to(BF16) / 8 for shape in ((128, 128), (128, 64)))
    routing = glulam.route(torch.randn(6, 2), 1)
    for call in (
        lambda x: glulam.moe(x, routing, w1, w2, recipe="mxfp8"),
        lambda x: glulam.grouped_mlp(x, w1, w2, splits=[2, 4], recipe="mxfp8"),
    ):
        got, wanted = call(made.x_mxfp8), call(made.x)
        assert wanted.any() and torch.allclose(got.float(), wanted.float(), atol=0.05)
        assert block == "1x32" or same_bits(got, wanted)


@each_block
def test_a_gradient_is_refused(block: Any) -> None:
    arguments = given((3,), 32, dtype=F32)
    arguments[5].requires_grad_()
    message = r"x_block makes x in MXFP8, which has no gradient, and weight requires one; leave x_block out"
    compiled = torch.compile(mhc.boundary, backend="aot_eager", fullgraph=True)
    with pytest.raises(GradientNotSupported, match=message):
        mhc.boundary(*arguments, x_block=block)
    with pytest.raises(Exception, match=message):
        compiled(*arguments, x_block=block)
    with torch.no_grad():
        assert mhc.boundary(*arguments, x_block=block).x_mxfp8.block == block


@pytest.mark.parametrize("form", [list, update_removed])
def test_compiled_and_fake(form: Callable[..., Any]) -> None:
    torch.compiler.reset()
    arguments = form(given((3,), 64, dtype=F32, streams=BF16))
    wanted = mhc.boundary(*arguments, x_block="1x32", return_x=True)
    compiled = torch.compile(mhc.boundary, backend="aot_eager", fullgraph=True)
    made = compiled(*arguments, x_block="1x32", return_x=True)
    assert all(map(same_bits, made[:5], wanted[:5]))
    assert all(map(torch.equal, data_and_scales(made.x_mxfp8), data_and_scales(wanted.x_mxfp8)))
    with FakeTensorMode() as mode:
        fake = mhc.boundary(
            *[None if one is None else mode.from_tensor(one) for one in arguments], x_block="1x32"
        )  # fmt: skip
    assert fake.x is None and fake.x_mxfp8.shape == (3, 64) and fake.x_mxfp8.scale.shape == (3, 2)


@each_block
def test_torch_takes_the_operator_for_sound(block: str) -> None:
    operator = torch.ops.glulam.mhc_boundary.default
    for of_x in (True, False):
        arguments = given((3,), 64, dtype=F32, streams=BF16)
        torch.library.opcheck(operator, (*arguments, 1e-6, 1e-6, 1e-6, 3, False, of_x, BLOCKS[block]))


def test_a_connection_of_v41_passes_the_options_on() -> None:
    layer = HyperConnection(4, 64, form="v4.1")
    carried = HyperStreams.begin(torch.randn(3, 64, dtype=BF16), 4)
    with torch.no_grad():
        plain, made = layer.boundary(carried), layer.boundary(carried, x_block="1x32")
    for one, other in zip(*map(data_and_scales, (made.x_mxfp8, glulam.quantize_mxfp8(plain.x))), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(GradientNotSupported, match="weight requires one"):
        layer.boundary(carried, x_block="1x32")


def call(width: int = 32, dtype: torch.dtype = BF16, lead: tuple[int, ...] = (3,), **options: Any) -> Any:
    return mhc.boundary(*given(lead, width, dtype=torch.promote_types(F32, dtype), streams=dtype), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x_block": "1x64"}, ValueError, "x_block is '1x64'; choose one of 1x32, 1x128"),
        ({"x_block": 32}, ValueError, "x_block is 32; choose one of"),
        ({"return_x": 1}, TypeError, "return_x is 1; give True or False"),
        ({"x_block": "1x32", "width": 40}, ValueError, "D = 40; x_block quantises x in blocks of 32.*quantize_mxfp8"),
        ({"x_block": "1x128", "lead": ()}, ValueError, r"streams has shape \[4, 32\].*give \[..., T, n, D\]"),
        ({"x_block": "1x32", "dtype": torch.float64}, TypeError, "streams is torch.float64; x_block quantises"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**options)


def test_return_x_alone_changes_nothing() -> None:
    made = call(return_x=True)
    assert type(made) is mhc.BoundaryResults and all(map(same_bits, made, call()))


def test_copies_and_pytrees_of_the_results() -> None:
    made = call(x_block="1x32")
    leaves, form = torch.utils._pytree.tree_flatten(made)
    again = torch.utils._pytree.tree_unflatten(leaves, form)
    assert type(again) is mhc.QuantizedBoundaryResults and dataclasses.is_dataclass(again.x_mxfp8)
