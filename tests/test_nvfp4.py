"""NVFP4Tensor and quantize_nvfp4 against the format's definition, and their use in operators and modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import mxfp4, nvfp4
from support.checks import check_mm
from support.inputs import make_case
from support.round_trips import WAYS, round_trip, same
from torch import Tensor

import glulam
from glulam import MXFP4Tensor, NVFP4Tensor, quantize_nvfp4

E4M3, RECIPE = torch.float8_e4m3fn, "nvfp4_weight_only"


def random_tensor(*shape: int, seed: int = 0, of: str = "expert") -> NVFP4Tensor:
    """Return random elements, scales of all magnitudes, and random global scales: one for "all", or one per "expert" or
    "half" of an expert.
    """
    generator = torch.Generator().manual_seed(seed)
    *lead, k = shape
    data = torch.randint(256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x7F, (*lead, k // 16), dtype=torch.uint8, generator=generator)
    sizes = {"all": (), "expert": shape[:1], "half": (shape[0], 2)}[of] if len(shape) == 3 else ()
    return NVFP4Tensor(data, scale, torch.rand(sizes, generator=generator) + 0.5)


class TestTensor:
    def test_every_byte_with_every_scale(self) -> None:
        data = torch.arange(256, dtype=torch.uint8).view(16, 16)
        for byte in range(256):
            q = NVFP4Tensor(data, torch.full((16, 2), byte, dtype=torch.uint8), torch.tensor(3.0))
            wanted = nvfp4.values(q.data, q.scale, q.global_scale)
            assert torch.equal(q.dequantize().double().nan_to_num(nan=7.5), wanted.nan_to_num(nan=7.5))

    @pytest.mark.parametrize("of", ["all", "expert", "half"])
    def test_global_scales(self, of: str) -> None:
        q = random_tensor(3, 8, 64, of=of)
        wanted = nvfp4.values(q.data, q.scale, q.global_scale)
        torch.testing.assert_close(q.dequantize().double(), wanted, rtol=2**-23, atol=0)
        assert torch.equal(q[1:].dequantize(), q.dequantize()[1:])
        assert torch.equal(copy.deepcopy(q).prepare_().dequantize(), q.dequantize())
        if of == "half":
            with pytest.raises(IndexError, match="slice of experts"):
                q[0]
        else:
            assert torch.equal(q[2][1:3].dequantize(), q.dequantize()[2, 1:3])

    @pytest.mark.parametrize("prepared", [False, True])
    @pytest.mark.parametrize("way", WAYS)
    def test_round_trips(self, way: str, prepared: bool) -> None:
        q = random_tensor(2, 8, 96)
        if prepared:
            q.prepare_()
        assert set(q.tensors("w1_")) == {"w1_data", "w1_scale", "w1_global_scale"} and q.metadata() == {}
        other = round_trip(q, way)
        if prepared and way == "checkpoint":
            other.prepare_()
        assert same(q, other) and other.data.data_ptr() != q.data.data_ptr()

    def test_moves(self) -> None:
        q = random_tensor(2, 8, 64)
        assert q.to("cpu") is q and same(q.clone(), q) and q.nbytes == 2 * (8 * (32 + 4) + 4)
        assert q.to("meta").global_scale.is_meta and repr(q) == "NVFP4Tensor([2, 8, 64], device='cpu')"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"data": torch.zeros(2, 8, 32)}, "data is torch.float32"),
            ({"scale": torch.ones(2, 8, 4)}, "scale is torch.float32; it must be a tensor of torch.float8_e4m3fn"),
            ({"scale": torch.ones(2, 8, 2, dtype=torch.uint8)}, r"are \[2, 8, 4\]"),
            ({"data": torch.zeros(2, 8, 24, dtype=torch.uint8)}, "K = 48"),
            ({"global_scale": torch.ones(2, dtype=torch.float64)}, "global_scale is torch.float64"),
            ({"global_scale": torch.ones(3)}, r"has shape \[3\]; of a weight \[2, 8, 64\] it is \[\], \[2\], \[2, 2\]"),
            ({"global_scale": torch.tensor([1.0, 0.0])}, "is 0, negative, NaN or infinite.*weight_scale_2"),
            ({"global_scale": torch.tensor([1.0, -1.0])}, "is 0, negative"),
            ({"global_scale": torch.tensor(torch.nan)}, "is 0, negative"),
            ({"global_scale": torch.ones(2, device="meta")}, "global_scale is on meta"),
        ],
    )
    def test_parts_that_do_not_fit(self, change: dict[str, Tensor], message: str) -> None:
        q = random_tensor(2, 8, 64)
        parts = {"data": q.data, "scale": q.scale, "global_scale": q.global_scale}
        with pytest.raises((ValueError, TypeError), match=message):
            NVFP4Tensor(**{**parts, **change})


class TestQuantiser:
    def test_each_element_is_the_nearest(self) -> None:
        """No element that the block's scale allows is nearer, and the scale is the E4M3 number next to maximum / 6."""
        torch.manual_seed(0)
        w = torch.randn(3, 8, 64, dtype=torch.float64).float() * torch.tensor([1e-3, 1.0, 300.0])[:, None, None]
        q = quantize_nvfp4(w)
        for expert in range(3):
            amax = w[expert].abs().amax().double()
            torch.testing.assert_close(q.global_scale[expert].double(), amax / 2688, rtol=2**-23, atol=0)
            steps = nvfp4.NUMBERS[q.scale[expert].view(torch.uint8).long()] * q.global_scale[expert].double()
            blocks = w[expert].double().unflatten(1, (-1, 16))
            wanted = blocks.abs().amax(2) / 6 / q.global_scale[expert].double()
            assert ((nvfp4.NUMBERS[q.scale[expert].view(torch.uint8).long()] / wanted - 1).abs() <= 2**-4 + 1e-6).all()
            values = nvfp4.values(q.data, q.scale, q.global_scale)[expert].unflatten(1, (-1, 16))
            choices = mxfp4.NUMBERS * steps[..., None]
            best = (blocks[..., None] - choices[:, :, None, :]).abs().amin(-1)
            torch.testing.assert_close((blocks - values).abs(), best, rtol=0, atol=1e-6 * float(amax))

    def test_values_of_the_format_stay(self) -> None:
        """Each block has the greatest element, and some block the greatest scale."""
        scale = torch.randint(0x38, 0x7E, (2, 4, 4), dtype=torch.uint8)
        scale[:, 0, 0] = 0x7E
        data = torch.randint(256, (2, 4, 32), dtype=torch.uint8)
        data[..., ::8] = 0x77
        q = NVFP4Tensor(data, scale, torch.tensor([0.5, 4.0]))
        made = quantize_nvfp4(q.dequantize())
        assert torch.equal(made.dequantize(), q.dequantize()) and torch.equal(made.global_scale, q.global_scale)

    def test_nan_inf_and_zero(self) -> None:
        w = torch.ones(2, 4, 64)
        w[0, 1, 5], w[0, 2, 40], w[1] = torch.nan, torch.inf, 0
        q = quantize_nvfp4(w)
        values = nvfp4.values(q.data, q.scale, q.global_scale)
        assert values[0, 1, :16].isnan().all() and values[0, 2, 32:48].isnan().all()
        assert values[0].isnan().sum() == 32 and (values[0].nan_to_num(nan=1.0) - 1).abs().max() < 0.04
        assert torch.equal(values[1], torch.zeros(4, 64, dtype=torch.float64)) and q.global_scale[1] == 1

    @pytest.mark.parametrize(
        ("w", "message"),
        [
            (torch.ones(4, 48), "multiple of 32"),
            (torch.ones(64), "multiple of 32"),
            (torch.ones(4, 64, dtype=torch.float64), "float64"),
            ([1.0], "w is list"),
            (torch.ones(4, 64, requires_grad=True), "gradient"),
        ],
    )
    def test_refuses(self, w: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            quantize_nvfp4(w)

    def test_a_weight_that_is_trained_under_no_grad(self) -> None:
        w = torch.randn(2, 4, 64, requires_grad=True)
        with torch.no_grad():
            q = quantize_nvfp4(w)
        assert same(q, quantize_nvfp4(w.detach())) and not any(part.requires_grad for part in q.parts)


class TestOperators:
    SIZES = (5, 0, 9, 3)

    @pytest.mark.parametrize("of", ["all", "expert", "half"])
    @pytest.mark.parametrize("prepared", [False, True])
    def test_the_result_is_that_of_the_dequantised_weight(self, of: str, prepared: bool) -> None:
        c = make_case(list(self.SIZES), 96, 64)
        w1, w2 = random_tensor(4, 128, 96, of=of), random_tensor(4, 96, 64, seed=1)
        exact = [nvfp4.values(*w.parts).float() for w in (w1, w2)]
        if prepared:
            w1, w2 = w1.prepare_(), w2.prepare_()
        options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale}
        y = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, recipe=RECIPE, **options)
        wanted = glulam.grouped_mlp(c.x, *(w.to(c.x.dtype) for w in exact), offs=c.offs, **options)
        scale = wanted[: c.rows].float().abs().max()
        assert scale > 1 and (y[: c.rows].float() - wanted[: c.rows].float()).abs().max() < 0.02 * scale
        if of != "half":  # which are a gate's
            check_mm(c, exact[0], glulam.grouped_mm(c.x, w1, offs=c.offs))

    def test_weights_in_16_bits_are_quantised_once(self) -> None:
        c = make_case(list(self.SIZES), 96, 64)
        y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=RECIPE)
        wanted = glulam.grouped_mlp(c.x, quantize_nvfp4(c.w1), quantize_nvfp4(c.w2), offs=c.offs, recipe=RECIPE)
        assert torch.equal(y[: c.rows], wanted[: c.rows])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"glu_layout": "interleaved"}, "w1's global_scale has one number for each half"),
            ({"w2": MXFP4Tensor(torch.zeros(4, 96, 32, dtype=torch.uint8), torch.zeros(4, 96, 2, dtype=torch.uint8))},
             "w2 is an MXFP4Tensor, but recipe 'nvfp4_weight_only' takes an NVFP4Tensor"),
            ({"recipe": "mxfp4_weight_only"}, "w1 is an NVFP4Tensor.*choose recipe 'nvfp4_weight_only'"),
            ({"recipe": "bf16"}, "w1 is in NVFP4, and recipe is 'bf16'"),
            ({"w2": torch.zeros(4, 96, 64, requires_grad=True)}, "w2 requires a gradient.*are frozen"),
        ],
    )  # fmt: skip
    def test_refuses(self, change: dict[str, Any], message: str) -> None:
        call = {
            "x": torch.zeros(17, 96), "w1": random_tensor(4, 128, 96, of="half"), "w2": random_tensor(4, 96, 64),
            "splits": list(self.SIZES), "recipe": RECIPE, **change,
        }  # fmt: skip
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            glulam.grouped_mlp(**call)

    def test_a_trace_sees_one_operator(self) -> None:
        c, w1, w2 = make_case(list(self.SIZES), 96, 64), random_tensor(4, 128, 96), random_tensor(4, 96, 64)
        call = lambda x, a, b: glulam.grouped_mlp(x, a, b, offs=c.offs, recipe=RECIPE)  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(c.x, w1, w2)[: c.rows], call(c.x, w1, w2)[: c.rows])


class TestModule:
    def test_its_own_state_goes_round(self) -> None:
        mlp, other = (glulam.nn.GroupedMLP(3, 64, 96, recipe=RECIPE) for _ in range(2))
        with torch.no_grad():
            mlp.fc1.weight_global_scale.copy_(torch.rand(3, 2) + 0.1)
        state = mlp.state_dict()
        assert {key: value.dtype for key, value in state.items() if key.startswith("fc1")} == {
            "fc1.weight": torch.uint8, "fc1.weight_scale": torch.uint8, "fc1.weight_global_scale": torch.float32,
        }  # fmt: skip
        other.load_state_dict(state)
        x = torch.randn(7, 64)
        with torch.no_grad():
            assert torch.equal(mlp(x, splits=[3, 0, 4]), other(x, splits=[3, 0, 4]))

    @pytest.mark.parametrize("glu_layout", ["concat", "interleaved"])
    def test_weights_in_16_bits_are_quantised_as_they_load(self, glu_layout: str) -> None:
        mlp = glulam.nn.GroupedMLP(3, 64, 96, recipe=RECIPE, glu_layout=glu_layout)
        w1, w2 = torch.randn(3, 192, 64), torch.randn(3, 64, 96)
        w1[:, :96] *= 50
        mlp.load_state_dict({"fc1.weight": w1, "fc2.weight": w2})
        first, second = mlp.fc1.experts("weight"), mlp.fc2.experts("weight")
        assert first.global_scale.shape == ((3, 2) if glu_layout == "concat" else (3,))
        assert (first.dequantize() - w1)[:, 96:].norm() < 0.15 * w1[:, 96:].norm()
        assert torch.equal(second.dequantize(), quantize_nvfp4(w2).dequantize())

    def test_a_part_of_another_dtype_is_refused(self) -> None:
        mlp = glulam.nn.GroupedMLP(3, 64, 96, recipe=RECIPE)
        state = {**mlp.state_dict(), "fc1.weight_global_scale": torch.ones(3, 2, dtype=torch.float64)}
        with pytest.raises(RuntimeError, match="fc1.weight_global_scale is torch.float64"):
            mlp.load_state_dict(state)
