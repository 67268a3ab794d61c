"""MXFP4Tensor and quantize_mxfp4 against the format's definition; and the kernels' decoding, number by number."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mxfp4
from support.checks import check_mm
from support.fake_gpu import FakeGpu
from support.inputs import make_case, poisoned
from support.round_trips import WAYS, round_trip, same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import glulam
from glulam import MXFP4Tensor, MXFP8Tensor, quantize_mxfp4
from glulam.formats import words
from glulam.formats.prepared import PREPARED
from glulam.formats.words import bytes_of, words_of

pytest_plugins = ["support.fixtures"]

BF16, E8M0 = torch.bfloat16, torch.float8_e8m0fnu


def random_tensor(*shape: int, seed: int = 0) -> MXFP4Tensor:
    generator = torch.Generator().manual_seed(seed)
    *lead, k = shape
    data = torch.randint(256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    return MXFP4Tensor(data, torch.randint(100, 150, (*lead, k // 32), dtype=torch.uint8, generator=generator))


class TestTensor:
    def test_every_byte_with_every_scale(self) -> None:
        """In float32, and to bfloat16 exactly where that has the range."""
        data = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 1)
        for byte in range(256):
            q = MXFP4Tensor(data, torch.full((16, 1), byte, dtype=torch.uint8))
            wanted = mxfp4.values(q.data, q.scale)
            assert torch.equal(q.dequantize().double().nan_to_num(nan=7.5), wanted.float().double().nan_to_num(nan=7.5))
            if byte <= 252:
                assert torch.equal(q.dequantize(BF16).double(), wanted)

    def test_gpt_oss_blocks_are_viewed(self) -> None:
        blocks = torch.randint(256, (3, 64, 5, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (3, 64, 5), dtype=torch.uint8)
        q = MXFP4Tensor.from_blocks(blocks, scales)
        assert q.shape == (3, 64, 160) and q.data.data_ptr() == blocks.data_ptr()
        assert q.scale.data_ptr() == scales.data_ptr() and q.scale.dtype == E8M0
        low, high = blocks[1, 2, 3, 4] % 16, blocks[1, 2, 3, 4] // 16
        wanted = torch.stack((mxfp4.NUMBERS[low.long()], mxfp4.NUMBERS[high.long()])) * 2.0 ** (
            int(scales[1, 2, 3]) - 127
        )
        assert torch.equal(q.dequantize()[1, 2, 3 * 32 + 8 : 3 * 32 + 10].double(), wanted)

    def test_slices_are_views(self) -> None:
        q = random_tensor(4, 6, 64)
        for index in (2, slice(1, 3)):
            part = q[index]
            assert part.data.data_ptr() == q.data[index].data_ptr()
            assert torch.equal(part.dequantize(), q.dequantize()[index])
        rows = q[0][2:5]
        assert torch.equal(rows.dequantize(), q.dequantize()[0, 2:5])
        with pytest.raises(IndexError, match="slice its rows"):
            q[0][0]

    @pytest.mark.parametrize("prepared", [False, True])
    @pytest.mark.parametrize("way", WAYS)
    def test_round_trips(self, way: str, prepared: bool) -> None:
        q = random_tensor(2, 8, 96)
        if prepared:
            q.prepare_()
        assert {t.dtype for t in q.tensors().values()} == {torch.uint8} and q.metadata() == {}
        other = round_trip(q, way)
        if prepared and way == "checkpoint":
            other.prepare_()
        assert same(q, other) and other.data.data_ptr() != q.data.data_ptr()

    def test_moves(self) -> None:
        q = random_tensor(2, 8, 64)
        assert q.to("cpu") is q and same(q.clone(), q) and q.nbytes == 2 * 8 * (32 + 2)
        with pytest.raises(TypeError, match="MXFP4 has no other dtype"):
            q.to(torch.bfloat16)  # type: ignore[arg-type]
        assert repr(q) == "MXFP4Tensor([2, 8, 64], device='cpu')"

    @pytest.mark.parametrize(
        ("data", "scale", "message"),
        [
            (torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.uint8), "data is torch.float32"),
            (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1), "scale is torch.float32"),
            (torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), r"give \[..., N, K/2\]"),
            (torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), "so K = 48"),
            (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), r"are \[2, 2\]"),
        ],
    )
    def test_parts_that_do_not_fit(self, data: Tensor, scale: Tensor, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            MXFP4Tensor(data, scale)

    def test_blocks_that_lie_apart(self) -> None:
        blocks = torch.zeros(2, 8, 4, 16, dtype=torch.uint8)
        with pytest.raises(ValueError, match="do not lie together"):
            MXFP4Tensor.from_blocks(blocks[:, :, ::2], torch.zeros(2, 8, 2, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"give \[..., N, K/32, 16\]"):
            MXFP4Tensor.from_blocks(blocks.flatten(-2), torch.zeros(2, 8, 4, dtype=torch.uint8))


class TestQuantiser:
    def test_every_bfloat16_as_maximum(self) -> None:
        """The scale of each, and elements at all fractions of it."""
        bits = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16)
        fractions = torch.cat((torch.linspace(-1, 1, 30), torch.tensor([1.0, -0.0])))
        blocks = (bits.view(BF16).float()[:, None] * fractions).to(BF16)
        blocks[:, 30] = bits.view(BF16)
        q = quantize_mxfp4(blocks)
        sampled = torch.randperm(len(bits), generator=torch.Generator().manual_seed(1))[:2000].tolist()
        for row in [0, 1, 127, 128, 129, 0x7F7F, *sampled]:
            codes, byte = mxfp4.quantized_block(blocks[row].tolist())
            got = torch.stack((q.data[row] % 16, q.data[row] // 16), dim=1).flatten()
            assert int(q.scale.view(torch.uint8)[row]) == byte, row
            assert got.tolist() == codes, row

    @given(values=st.lists(st.floats(-8, 8, width=32), min_size=32, max_size=32), power=st.integers(-140, 120))
    @settings(max_examples=200)
    def test_any_block(self, values: list[float], power: int) -> None:
        block = torch.tensor(values) * 2.0**power
        q = quantize_mxfp4(block[None])
        codes, byte = mxfp4.quantized_block(block.tolist())
        got = torch.stack((q.data[0] % 16, q.data[0] // 16), dim=1).flatten().tolist()
        assert (got, int(q.scale.view(torch.uint8)[0])) == (codes, byte)

    def test_ties_go_to_the_even_one(self) -> None:
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 4)
        got = quantize_mxfp4(torch.stack((ties, -ties))).dequantize()
        wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0] * 4)
        assert torch.equal(got, torch.stack((wanted, -wanted)))

    def test_nan_inf_and_zero(self) -> None:
        w = torch.ones(3, 64)
        w[0, 40], w[1, 3], w[2, 32:] = torch.nan, -torch.inf, 0
        q = quantize_mxfp4(w)
        assert q.scale.view(torch.uint8).tolist() == [[125, 0xFF], [253, 125], [125, 0]]
        values = q.dequantize()
        assert bool(values[0, 32:].isnan().all()) and values[1, 3] == -torch.inf and not values[2, 32:].any()

    def test_values_of_the_format_stay(self) -> None:
        """What a block holds on its own least scale comes back; so does each of many matrices, in given buffers."""
        q = random_tensor(3, 2, 16, 64)
        q.data[..., ::16] |= 0x7  # 6 in each block
        out = MXFP4Tensor(torch.full_like(q.data, 0xAA), torch.full(q.scale.shape, 3, dtype=torch.uint8))
        assert quantize_mxfp4(q.dequantize(), out=out) is out
        assert torch.equal(out.scale.view(torch.uint8), q.scale.view(torch.uint8))
        assert torch.equal(out.dequantize(), q.dequantize())

    @pytest.mark.parametrize(
        ("w", "out", "message"),
        [
            (torch.zeros(4, 48), None, "K a multiple of 32"),
            (torch.zeros(64), None, r"give \[..., N, K\]"),
            (torch.zeros(4, 64, dtype=torch.float64), None, "w is torch.float64"),
            ([1.0], None, "w is list"),
            (torch.zeros(4, 64), torch.zeros(4, 32), "give an MXFP4Tensor"),
            (torch.zeros(4, 64), random_tensor(5, 64), "must have w's shape"),
            (torch.zeros(4, 64), random_tensor(4, 64).prepare_(), "out is prepared"),
            (torch.zeros(4, 64, requires_grad=True), None, "requires"),
        ],
    )
    def test_refuses(self, w: Any, out: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            quantize_mxfp4(w, out=out)


DECODER = """
import json
from cute_kernels.decoding.elements import E2m1
from cute_kernels.decoding.scales import E8m0
from cutlass import Int32
element = E2m1()
scales = E8m0(element, None)
def word(byte, index):
    word = byte << 8 * index
    return Int32(word - (word >> 31 << 32))
def of_each(function):
    return [int(function(word(byte, byte % 4), byte % 4)) for byte in range(256)]
print(json.dumps({
    "first_bad": scales.first_bad,
    "first_large": scales.first_large,
    "read": [[int(element.spread(Int32(word), pair)) for pair in range(4)] for word in WORDS],
    "multiplier": of_each(lambda word, index: scales.multipliers(word, index, 1)[0]),
    "rest": of_each(scales.rest_of_multiplier),
    "small": [int(scales.small_multipliers(Int32(byte), 1, None)[0]) for byte in range(scales.first_large)],
    "large": of_each(lambda word, index: scales.large(word)),
    "bad": [int(scales.bad(word(byte, byte % 4), byte % 8)) for byte in range(256)],
}))
"""
"""Program that prints the values that kernels decode from each byte. The DSL runs in a process of its own."""


class TestWords:
    """Tests of the order in which kernels read elements within 32-bit words."""

    def test_every_byte_in_every_place(self) -> None:
        """Of words of other bytes, in blocks of either kind."""
        generator = torch.Generator().manual_seed(5)
        data = torch.randint(256, (256, 3, 7 * 16), dtype=torch.uint8, generator=generator)
        data[:, 1, :64] = torch.arange(256, dtype=torch.uint8)[:, None]
        words = words_of(data)
        assert words.dtype == torch.int32 and words.shape == (256, 3, 28)
        assert torch.equal(mxfp4.bytes_of_words(words[::16]), data[::16]) and torch.equal(bytes_of(words), data)

    def test_every_word_is_one_of_bytes(self) -> None:
        words = torch.randint(-(2**31), 2**31, (64, 64), generator=torch.Generator().manual_seed(6)).int()
        assert torch.equal(words_of(bytes_of(words)), words)

    def test_large_tensors_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q = random_tensor(3, 5, 64)
        wanted = words_of(q.data)
        monkeypatch.setattr("glulam.formats.words.CHUNK_BYTES", 64)
        assert torch.equal(words_of(q.data), wanted) and torch.equal(bytes_of(wanted), q.data)

    def test_prepared_where_it_lies(self) -> None:
        q = random_tensor(2, 8, 96)
        values, stored, where = q.dequantize(), {k: t.clone() for k, t in q.tensors().items()}, q.data.data_ptr()
        assert not q.is_prepared and q.prepare_() is q and q.is_prepared and q.data.data_ptr() == where
        assert q.shape == (2, 8, 96) and q.nbytes == 2 * 8 * (48 + 3) and torch.equal(q.dequantize(), values)
        assert all(torch.equal(t, stored[name]) for name, t in q.tensors().items())
        assert torch.equal(q[1].dequantize(), values[1]) and torch.equal(q.prepare_().dequantize(), values)

    @pytest.mark.parametrize("allow", [False, True])
    def test_fake_tensors_are_prepared_and_change_no_later_call(self, allow: bool) -> None:
        """Whichever comes first: tables of this conversion were once kept as fake tensors, or as real ones."""
        for first in (False, True):
            words._tables.cache_clear()
            if first:
                words_of(random_tensor(2, 8, 64).data)
            with FakeTensorMode(allow_non_fake_inputs=allow):
                made = words_of(torch.empty(2, 8, 32, dtype=torch.uint8))
                assert made.shape == (2, 8, 8) and made.dtype == torch.int32
            q = random_tensor(2, 8, 64)
            assert torch.equal(bytes_of(words_of(q.data)), q.data)

    def test_an_expert_alone_is_prepared_as_with_others(self) -> None:
        one, all_ = random_tensor(3, 8, 160), random_tensor(3, 8, 160).prepare_()
        assert same(one[1].clone().prepare_(), all_[1])

    def test_refuses_what_is_not_contiguous(self) -> None:
        with pytest.raises(ValueError, match=r"not contiguous words; give clone\(\)"):
            MXFP4Tensor(torch.zeros(8, 64, dtype=torch.uint8)[:, :32], torch.zeros(8, 2, dtype=torch.uint8)).prepare_()


def test_kernels_decode_every_byte_with_every_scale_exactly() -> None:
    """Their integers as the numbers that these bits are; only the products are torch's."""
    words = words_of(torch.arange(1024).to(torch.uint8).view(-1, 4, 4).flip(-1).flatten(-2)).flatten().tolist()
    script = DECODER.replace("WORDS", str(words))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)

    def numbers(words: list[int]) -> Tensor:
        """Return the two bfloat16 numbers of each word, lower half first, as float32, in which their products are
        exact.
        """
        return torch.tensor(words).to(torch.int32).view(BF16).float().view(-1, 2)

    found = torch.tensor([mxfp4.bytes_of_word(word & mxfp4.WORD) for word in words])
    codes = torch.stack((found % 16, found // 16), dim=-1)
    read, wanted = numbers(sum(told["read"], [])), mxfp4.NUMBERS[codes.flatten(0, 1)]
    assert torch.equal(read.double() * 2.0**126, wanted) and len(wanted.unique()) == 15
    assert [bad != 0 for bad in told["bad"]] == [byte >= told["first_bad"] for byte in range(256)]
    assert [large != 0 for large in told["large"]] == [byte >= told["first_large"] for byte in range(256)]
    assert told["small"] == told["multiplier"][: told["first_large"]]
    multipliers, rests = numbers(told["multiplier"]), numbers(told["rest"])
    for byte in range(told["first_bad"]):
        assert bool((rests[byte] == 1).all()) is (byte < told["first_large"])
        first = (read * multipliers[byte]).to(BF16).float()
        assert torch.equal((first * rests[byte]).to(BF16).double(), wanted * 2.0 ** (byte - 127)), byte


class TestRecipe:
    """Tests specific to MXFP4; test_recipes.py tests all recipes."""

    @pytest.mark.parametrize("prepared", [False, True])
    def test_the_result_is_that_of_the_dequantised_weight(self, prepared: bool) -> None:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(24, 96, generator=generator).to(BF16)
        w1, w2 = random_tensor(3, 128, 96), random_tensor(3, 96, 64, seed=1)
        if prepared:
            w1.prepare_(), w2.prepare_()
        options = {"splits": [7, 0, 17], "activation": "clamped_swiglu", "glu_layout": "interleaved"}
        got = glulam.grouped_mlp(x, w1, w2, **options, recipe="mxfp4_weight_only")
        wanted = glulam.grouped_mlp(x, w1.dequantize(BF16), w2.dequantize(BF16), **options)
        assert torch.equal(got, wanted) and float(wanted.float().abs().max()) > 1e3

    def test_weights_in_another_format_are_refused(self) -> None:
        x, sizes = torch.zeros(4, 64, dtype=BF16), [2, 2]
        four = random_tensor(2, 64, 64)
        eight = glulam.quantize_mxfp8(torch.ones(128, 64))
        eight = MXFP8Tensor(eight.data.view(2, 64, 64), eight.scale.view(2, 64, 2))
        with pytest.raises(TypeError, match=r"w1 is an MXFP8Tensor.*takes an MXFP4Tensor.*recipe 'mxfp8'"):
            glulam.grouped_mlp(x, eight, four, splits=sizes, recipe="mxfp4_weight_only", activation="gelu")
        with pytest.raises(TypeError, match=r"w2 is an MXFP4Tensor.*recipe 'mxfp4_weight_only'"):
            glulam.grouped_mlp(x, eight, four, splits=sizes, recipe="mxfp8_weight_only", activation="gelu")
        with pytest.raises(TypeError, match=r"w1 is in MXFP4, and recipe is 'bf16'.*'mxfp4_weight_only'"):
            glulam.grouped_mlp(x, four, four, splits=sizes, activation="gelu")

    def test_a_wrong_shape_is_told_in_elements(self) -> None:
        x = torch.zeros(4, 64, dtype=BF16)
        with pytest.raises(ValueError, match=r"w1 .*\[2, 64, 96\]"):
            glulam.grouped_mlp(
                x, random_tensor(2, 64, 96), random_tensor(2, 64, 64), splits=[2, 2], recipe="mxfp4_weight_only",
                activation="gelu",
            )  # fmt: skip


class TestMm:
    """grouped_mm with an MXFP4Tensor equals that with the dequantised weight, which bfloat16 holds exactly."""

    SIZES = (5, 0, 17, 1)

    @pytest.mark.parametrize("prepared", [False, True])
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_everything(self, anywhere: FakeGpu | None, with_bias: bool, prepared: bool) -> None:
        c = make_case(list(self.SIZES), 96, 64, tail=3)
        w, bias = random_tensor(4, 80, 96), torch.randn(4, 80).to(BF16) * 2.0**10
        if prepared:
            w.prepare_()
        options = {"bias": bias, "bias_scale": c.row_scale} if with_bias else {}
        out = poisoned(c.x.shape[0], 80, c.x, padding=8)
        for groups in ({"offs": c.offs}, {"splits": c.splits()}):
            out.fill_(torch.nan)
            assert glulam.grouped_mm(c.x, w, **groups, **options, out=out) is out
            check_mm(c, w.dequantize(BF16), out, **options)
            assert bool(out[c.rows :].isnan().all())
        if anywhere is not None:
            assert {spec.operands for spec in anywhere.specs} == {"mxfp4_weight_only"}

    def test_rows_by_index(self, anywhere: FakeGpu | None) -> None:
        c = make_case(list(self.SIZES), 96, 64)
        order = torch.randperm(c.rows, generator=torch.Generator().manual_seed(3))
        tokens, w = torch.empty_like(c.x), random_tensor(4, 80, 96)
        tokens[order] = c.x
        check_mm(c, w.dequantize(BF16), glulam.grouped_mm(tokens, w, offs=c.offs, rows=order.int()))

    @pytest.mark.parametrize("prepared", [False, True])
    def test_a_known_call_is_not_planned_anew(self, fake_gpu: FakeGpu, prepared: bool) -> None:
        """Nor are weights prepared anew, and those that are have no copy."""
        PREPARED.clear()
        c, w = make_case(list(self.SIZES), 96, 64), random_tensor(4, 80, 96)
        if prepared:
            w.prepare_()
        for _ in range(3):
            check_mm(c, w.dequantize(BF16), glulam.grouped_mm(c.x, w, offs=c.offs))
        assert len(fake_gpu.specs) == 1 and len(fake_gpu.launches) == 3 and len(PREPARED) == int(not prepared)

    def test_a_write_to_bytes_is_seen(self, fake_gpu: FakeGpu) -> None:
        c, w = make_case(list(self.SIZES), 96, 64), random_tensor(4, 80, 96)
        check_mm(c, w.dequantize(BF16), glulam.grouped_mm(c.x, w, offs=c.offs))
        w.data.bitwise_xor_(0x55)
        check_mm(c, w.dequantize(BF16), glulam.grouped_mm(c.x, w, offs=c.offs))
        w.prepare_()
        check_mm(c, w.dequantize(BF16), glulam.grouped_mm(c.x, w, offs=c.offs))

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_trace_sees_one_operator(self) -> None:
        c, w = make_case(list(self.SIZES), 96, 64), random_tensor(4, 80, 96)
        compiled = torch.compile(lambda x, q: glulam.grouped_mm(x, q, offs=c.offs), fullgraph=True, backend="aot_eager")
        check_mm(c, w.dequantize(BF16), compiled(c.x, w))

    def test_explained(self) -> None:
        c, w = make_case(list(self.SIZES), 96, 64), random_tensor(4, 80, 96)
        assert glulam.explain("grouped_mm", c.x, w, offs=c.offs).source == "reference"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"transpose_w": True}, r"w .*x has 96 columns, or give transpose_w=False"),
            ({"x": torch.zeros(8, 64, dtype=BF16)}, r"w .*\[4, 80, 96\].*x has 64 columns"),
            ({"w": random_tensor(80, 96)}, r"w .*E, N, K"),
            ({"bias": torch.zeros(4, 79, dtype=BF16)}, "bias"),
            ({"out": torch.zeros(8, 81, dtype=BF16)}, "out"),
        ],
    )
    def test_refuses(self, change: dict[str, Any], message: str) -> None:
        call = {"x": torch.zeros(8, 96, dtype=BF16), "w": random_tensor(4, 80, 96), "splits": [2, 2, 2, 2], **change}
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            glulam.grouped_mm(**call)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda scale: scale[:3], r"w's scale has shape \[3, 80, 3\].*\[4, 80, 3\]"),
            (lambda scale: scale[..., :2].contiguous(), r"w's scale has shape \[4, 80, 2\]"),
            (lambda scale: scale[:0], r"w's scale has shape \[0, 80, 3\]"),
            (lambda scale: scale.float(), r"w's scale is torch\.float32"),
            (lambda scale: scale.view(torch.uint8), r"w's scale is torch\.uint8"),
        ],
    )
    @pytest.mark.parametrize("prepared", [False, True])
    def test_scales_that_do_not_fit(self, anywhere: FakeGpu | None, change: Any, message: str, prepared: bool) -> None:
        """As functions of pytrees make them, which check nothing; also after the right call was planned."""
        x, w = torch.zeros(8, 96, dtype=BF16), random_tensor(4, 80, 96)
        if prepared:
            w.prepare_()
        offs = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
        glulam.grouped_mm(x, w, offs=offs)
        bad = MXFP4Tensor.unchecked(w.data, change(w.scale))
        for _ in range(2):
            with pytest.raises((ValueError, TypeError), match=message):
                glulam.grouped_mm(x, bad, offs=offs)
        if anywhere is not None:
            assert len(anywhere.launches) == 1

    def test_float16_is_refused_on_a_gpu(self, fake_gpu: FakeGpu) -> None:
        with pytest.raises(TypeError, match="takes bfloat16"):
            glulam.grouped_mm(torch.zeros(8, 96, dtype=torch.float16), random_tensor(4, 80, 96), splits=[2] * 4)


def gpt_oss_state(experts: int, hidden: int, inter: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the state of an MoE block in the format of gpt-oss's checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def bytes_(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    def bf16(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(BF16)

    return {
        "router.weight": bf16(experts, hidden), "router.bias": bf16(experts),
        "experts.gate_up_proj_blocks": bytes_(0, 256, experts, 2 * inter, hidden // 32, 16),
        "experts.gate_up_proj_scales": bytes_(118, 124, experts, 2 * inter, hidden // 32),
        "experts.gate_up_proj_bias": bf16(experts, 2 * inter),
        "experts.down_proj_blocks": bytes_(0, 256, experts, hidden, inter // 32, 16),
        "experts.down_proj_scales": bytes_(118, 124, experts, hidden, inter // 32),
        "experts.down_proj_bias": bf16(experts, hidden),
    }  # fmt: skip


GPT_OSS: dict[str, Any] = {
    "score": "topk_softmax", "router_bias": True, "bias": True, "activation": "clamped_swiglu", "dtype": BF16,
}  # fmt: skip


class TestModule:
    @pytest.mark.parametrize("glu_layout", ["interleaved", "concat"])
    def test_a_checkpoint_of_gpt_oss(self, anywhere: FakeGpu | None, glu_layout: str) -> None:
        """By its names, in either layout, with the result of the dequantised block in bfloat16."""
        state = gpt_oss_state(8, 96, 64)
        module = glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, glu_layout=glu_layout, recipe="mxfp4_weight_only")
        module.load_state_dict(state)
        twin = glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, glu_layout="interleaved")
        names = ("gate_up_proj", "down_proj")
        wide = {
            f"experts.{name}": MXFP4Tensor.from_blocks(
                state[f"experts.{name}_blocks"], state[f"experts.{name}_scales"]
            ).dequantize(BF16).mT for name in names
        }  # fmt: skip
        twin.load_state_dict(
            {name: value for name, value in state.items() if "_proj_" not in name or "bias" in name} | wide
        )
        x = torch.randn(20, 96, generator=torch.Generator().manual_seed(4)).to(BF16)
        with torch.no_grad():
            got, wanted = module(x), twin(x)
        assert torch.allclose(got.float(), wanted.float(), rtol=2**-6, atol=2**-6 * float(wanted.float().abs().max()))
        assert float(wanted.float().abs().max()) > 1
        if anywhere is not None:
            assert any(
                getattr(spec, "operands", None) == "mxfp4_weight_only" or hasattr(spec, "fc1")
                for spec in anywhere.specs
            )

    @pytest.mark.parametrize("glu_layout", ["interleaved", "concat"])
    def test_scales_in_8_bit_floats_are_bytes(self, glu_layout: str) -> None:
        state = gpt_oss_state(8, 96, 64)
        state["experts.down_proj_scales"][0, 0] = 100  # 2^-27, 0 as an integer
        floats = {key: value.view(E8M0) if key.endswith("_scales") else value for key, value in state.items()}
        one, other = (
            glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, glu_layout=glu_layout, recipe="mxfp4_weight_only") for _ in range(2)
        )
        one.load_state_dict(state)
        other.load_state_dict(floats)
        for fc in ("fc1", "fc2"):
            assert same(
                one.experts.get_submodule(fc).experts("weight"), other.experts.get_submodule(fc).experts("weight")
            )

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.int32, torch.int8, torch.int64])
    @pytest.mark.parametrize(
        "part", ["gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"]
    )
    def test_a_checkpoint_in_another_dtype_is_refused(self, part: str, dtype: torch.dtype, strict: bool) -> None:
        state = gpt_oss_state(8, 96, 64)
        state[f"experts.{part}"] = state[f"experts.{part}"].to(dtype)
        module = glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, recipe="mxfp4_weight_only")
        with pytest.raises(TypeError, match=rf"experts\.{part} is {dtype}"):
            module.load_state_dict(state, strict=strict)

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize(
        ("key", "dtype"),
        [
            ("fc1.weight_scale", torch.float32), ("fc2.weight_scale", BF16), ("fc1.weight_scale", torch.int32),
            ("fc1.weight", torch.int8), ("fc2.weight", torch.float32), ("fc2.weight", BF16),
            ("fc1.weight", torch.int64),
        ],
    )  # fmt: skip
    def test_its_own_state_in_another_dtype_is_refused(self, key: str, dtype: torch.dtype, strict: bool) -> None:
        """Of the words' shape, too; weights stay as they were."""
        module = glulam.nn.GroupedMLP(3, 64, 32, recipe="mxfp4_weight_only", dtype=BF16)
        state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
        for like in (state[key], dict(module.named_buffers())[key]):
            before = dict(module.named_buffers())[key].clone()
            with pytest.raises(RuntimeError, match=rf"{key} is {dtype}"):
                module.load_state_dict({**state, key: torch.ones(like.shape, dtype=dtype)}, strict=strict)
            assert torch.equal(dict(module.named_buffers())[key], before)

    @pytest.mark.parametrize("part", ["gate_up_proj_blocks", "down_proj_scales"])
    def test_a_part_that_is_missing_is_named(self, part: str) -> None:
        state = gpt_oss_state(8, 96, 64)
        del state[f"experts.{part}"]
        module = glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, recipe="mxfp4_weight_only")
        with pytest.raises(RuntimeError, match="(?s)Missing.*experts.fc1.weight.*Unexpected.*experts.down_proj"):
            module.load_state_dict(state)

    def test_its_state_is_that_of_checkpoints(self) -> None:
        """Bytes, whatever order kernels read; also where a module on the meta device takes tensors as they are."""
        state = gpt_oss_state(8, 96, 64)
        module = glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, glu_layout="interleaved", recipe="mxfp4_weight_only")
        module.load_state_dict(state)
        own = module.state_dict()
        for layer, name in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
            assert torch.equal(own[f"experts.{layer}.weight"], state[f"experts.{name}_blocks"].flatten(-2))
            assert torch.equal(own[f"experts.{layer}.weight_scale"], state[f"experts.{name}_scales"])
        with torch.device("meta"):
            other = glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, glu_layout="interleaved", recipe="mxfp4_weight_only")
        other.load_state_dict(own, assign=True)
        x = torch.randn(20, 96, generator=torch.Generator().manual_seed(4)).to(BF16)
        with torch.no_grad():
            assert torch.equal(other(x), module(x))
        assert module.experts.fc1.experts("weight").is_prepared and other.experts.fc1.experts("weight").is_prepared

    def test_its_own_state_goes_round(self) -> None:
        module = glulam.nn.GroupedMLP(3, 64, 32, bias=True, recipe="mxfp4_weight_only", dtype=BF16)
        assert set(module.state_dict()) == {
            f"{layer}.{name}" for layer in ("fc1", "fc2") for name in ("weight", "weight_scale", "bias")
        }
        other = glulam.nn.GroupedMLP(3, 64, 32, bias=True, recipe="mxfp4_weight_only", dtype=BF16)
        other.load_state_dict(module.state_dict())
        x = torch.randn(9, 64).to(BF16)
        with torch.no_grad():
            y = module(x, splits=[3, 3, 3])
            assert torch.equal(other(x, splits=[3, 3, 3]), y) and float(y.float().abs().max()) > 0.01
        assert {p.dtype for p in module.parameters()} == {BF16} and "mxfp4_weight_only" in repr(module)
        assert float(module.fc1.experts("weight").dequantize().abs().max()) <= 1 / 8

    def test_weights_in_16_bits_are_quantised_as_they_load(self) -> None:
        wide = glulam.nn.GroupedMLP(3, 64, 32, dtype=BF16)
        module = glulam.nn.GroupedMLP(3, 64, 32, recipe="mxfp4_weight_only", dtype=BF16)
        module.load_state_dict(wide.state_dict())
        assert same(module.fc1.experts("weight"), quantize_mxfp4(wide.fc1.weight.detach()).prepare_())
        with pytest.raises(RuntimeError, match="fc1.weight_scale"):  # what cannot be quantised is left to torch
            module.load_state_dict(wide.double().state_dict())

    def test_refused_at_construction(self) -> None:
        with pytest.raises(ValueError, match="packed is False, but recipe 'mxfp4_weight_only'"):
            glulam.nn.GroupedMLP(2, 64, 32, packed=False, recipe="mxfp4_weight_only")
        with pytest.raises(ValueError, match="recompute is True"):
            glulam.nn.GroupedMLP(2, 64, 32, recompute=True, recipe="mxfp4_weight_only")
        with pytest.raises(RuntimeError, match="weight"):
            glulam.nn.GroupedMLP(2, 64, 32, recipe="mxfp4_weight_only").load_state_dict({})


def with_scales(*shape: int, spans: tuple[int, ...] = (0, 5, 12)) -> MXFP4Tensor:
    """Return a random weight in which block b of a row has a scale spans[b] binades below the row's largest."""
    experts, rows, k = shape
    scale = 120 + torch.arange(rows)[:, None] % 7 - torch.tensor(spans)
    data = random_tensor(*shape).data
    return MXFP4Tensor(data, scale.to(torch.uint8).expand(experts, rows, k // 32).clone())


class TestRebasing:
    def test_a_row_s_power_of_two_is_that_of_its_greatest_scale(self) -> None:
        w = with_scales(2, 9, 96)
        for given_w in (w, w.clone().prepare_()):
            got = glulam.prepare_mxfp4_weight(given_w)
            assert torch.equal(got.row_scale.view(torch.uint8), w.scale.view(torch.uint8).amax(dim=-1) - 6)
            assert torch.equal(got.data.view(torch.uint8), w.data) and got.shape == w.shape
            assert torch.equal(got.dequantize(), w.dequantize())
        assert glulam.prepare_mxfp4_weight(w).data.data_ptr() == w.data.data_ptr(), "a view"

    def test_16_bits_are_quantised_first(self) -> None:
        w = torch.randn(2, 32, 64)
        assert torch.equal(glulam.prepare_mxfp4_weight(w).dequantize(), quantize_mxfp4(w).dequantize())

    def test_scales_too_far_apart_are_refused_by_name(self) -> None:
        w = with_scales(3, 8, 96)
        w.scale.view(torch.uint8)[2, 5, 1] = 100
        w.scale.view(torch.uint8)[2, 5, 0] = 113
        with pytest.raises(glulam.FoldError, match="row 5 of expert 2 has scales 2\\^13 apart.*'mxfp4_weight_only'"):
            glulam.prepare_mxfp4_weight(w)
        w.data[2, 5, 16:32] = 0x80  # zeros, of either sign
        assert int(glulam.prepare_mxfp4_weight(w).row_scale.view(torch.uint8)[2, 5]) == 107

    def test_nan_is_refused(self) -> None:
        w = with_scales(2, 8, 96)
        w.scale.view(torch.uint8)[1, 3, 2] = 255
        with pytest.raises(glulam.FoldError, match="row 3 of expert 1 has NaN among its scales"):
            glulam.prepare_mxfp4_weight(w)

    def test_zeros_and_the_least_scales(self) -> None:
        w = MXFP4Tensor(torch.zeros(1, 2, 32, dtype=torch.uint8), torch.tensor([[[0, 200], [0, 3]]], dtype=torch.uint8))
        w.data[0, 1] = 0x21
        assert glulam.prepare_mxfp4_weight(w).row_scale.view(torch.uint8).tolist() == [[0, 0]]

    @pytest.mark.parametrize("way", WAYS)
    def test_round_trips(self, way: str) -> None:
        w = glulam.prepare_mxfp4_weight(with_scales(2, 8, 96))
        same(round_trip(w, way), w)

    @pytest.mark.parametrize(
        ("w", "error", "message"),
        [
            (3, TypeError, "w is int; give an MXFP4Tensor"),
            (with_scales(2, 8, 96)[0], ValueError, r"shape \[8, 96\]; give the experts' weights together"),
        ],
    )
    def test_refuses(self, w: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            glulam.prepare_mxfp4_weight(w)

    def test_rows_that_do_not_fit(self) -> None:
        w = glulam.prepare_mxfp4_weight(with_scales(2, 8, 96))
        with pytest.raises(ValueError, match="they must be"):
            type(w)(w.data, w.scale, w.row_scale[:, :4])


class TestRebasedModule:
    def test_its_state_is_that_of_weights_alone(self) -> None:
        module, other = (
            glulam.nn.GroupedMLP(3, 64, 32, recipe=recipe, dtype=BF16) for recipe in ("mxfp4", "mxfp4_weight_only")
        )
        assert module.state_dict().keys() == other.state_dict().keys()
        other.load_state_dict(module.state_dict())
        for layer, same_one in ((module.fc1, other.fc1), (module.fc2, other.fc2)):
            assert torch.equal(layer.experts("weight").dequantize(), same_one.experts("weight").dequantize())
        module.load_state_dict(other.state_dict())

    def test_a_write_to_scales_is_seen(self) -> None:
        module = glulam.nn.GroupedMLP(3, 64, 32, recipe="mxfp4", dtype=BF16)
        x = torch.randn(6, 64).to(BF16)
        with torch.no_grad():
            before = module(x, splits=[2, 2, 2])
            module.fc2.weight_scale += 1
            assert torch.equal(module(x, splits=[2, 2, 2]), 2 * before)

    @pytest.mark.parametrize("way", ["replaced", "data", "data.copy_", "functional_call", "inference"])
    def test_powers_of_rows_follow_every_write(self, way: str) -> None:
        """The CPU's results do not depend on them, but kernels would multiply by stale ones."""

        def made(factor: float) -> Any:
            with torch.inference_mode(way == "inference"):
                module = glulam.nn.GroupedMLP(2, 64, 64, recipe="mxfp4", dtype=BF16)
                weights = {f"fc{i}.weight": torch.randn(2, 128 // i, 64) * factor for i in (1, 2)}
                module.load_state_dict(weights)
                return module

        module, other = made(1.0), made(2.0**12)
        before = module.fc1.experts("weight").row_scale.view(torch.uint8).clone()
        new = {name: getattr(other.fc1, name) for name in ("weight", "weight_scale")}
        for name, value in new.items():
            if way == "replaced":
                setattr(module.fc1, name, value)
            elif way == "data":
                getattr(module.fc1, name).data = value
            elif way == "data.copy_":
                getattr(module.fc1, name).data.copy_(value)
            elif way == "inference":
                with torch.inference_mode():
                    getattr(module.fc1, name).copy_(value)
        if way == "functional_call":
            given = {f"fc1.{name}": value for name, value in new.items()}
            torch.func.functional_call(module, given, (torch.randn(4, 64).to(BF16),), {"splits": [2, 2]})
            now = module.fc1.weight_row_scale
        else:
            now = module.fc1.experts("weight").row_scale.view(torch.uint8)
        assert torch.equal(now, other.fc1.weight_row_scale) and (now.int() - before.int()).min() > 8

    def test_refreshed_weights_are_read_again(self) -> None:
        layer = glulam.nn.GroupedMLP(2, 64, 64, recipe="mxfp4", dtype=BF16).fc1
        layer.experts("weight")
        wanted = layer.weight_row_scale.clone()
        for refresh in (glulam.refresh_weights, lambda: glulam.refresh_weights(layer)):
            layer.weight_row_scale.zero_()
            layer.experts("weight")
            assert not layer.weight_row_scale.any()
            refresh()
            layer.experts("weight")
            assert torch.equal(layer.weight_row_scale, wanted)

    def test_casts_and_traces_leave_them(self) -> None:
        module = glulam.nn.GroupedMLP(2, 64, 64, recipe="mxfp4", dtype=BF16)
        x, offs = torch.randn(4, 64).to(BF16), torch.tensor([2, 4]).int()
        with torch.no_grad():
            wanted = module(x, offs=offs)
            assert torch.equal(module.type(torch.bfloat16)(x, offs=offs), wanted)
            for strict in (True, False):
                exported = torch.export.export(module, (x,), {"offs": offs}, strict=strict).module()
                assert torch.equal(exported(x, offs=offs), wanted)
        with FakeTensorMode():
            made = glulam.nn.GroupedMLP(2, 64, 64, recipe="mxfp4", dtype=BF16)
            assert made(torch.empty(4, 64, dtype=BF16), offs=torch.empty(2, dtype=torch.int32)).shape == (4, 64)

    def test_what_fp8_does_not_hold_is_refused_as_it_loads(self) -> None:
        module = glulam.nn.GroupedMLP(3, 64, 32, recipe="mxfp4", dtype=BF16)
        state = module.state_dict()
        state["fc1.weight_scale"] = state["fc1.weight_scale"].clone()
        state["fc1.weight_scale"][1, 2, 0] += 30
        with pytest.raises(glulam.FoldError, match="row 2 of expert 1"):
            module.load_state_dict(state)

    @pytest.mark.parametrize("glu_layout", ["concat", "interleaved"])
    def test_a_checkpoint_of_gpt_oss(self, glu_layout: str) -> None:
        """As by weights alone, whose test compares it with its definition."""
        state = gpt_oss_state(8, 96, 64)
        first, second = (
            glulam.nn.MoE(96, 64, 8, 2, **GPT_OSS, glu_layout=glu_layout, recipe=recipe)
            for recipe in ("mxfp4", "mxfp4_weight_only")
        )
        for module in (first, second):
            module.load_state_dict(state)
        for name in ("fc1", "fc2"):
            one, other = (getattr(module.experts, name).experts("weight").dequantize() for module in (first, second))
            assert torch.equal(one, other) and float(one.abs().max()) > 0
