"""Experts for serving engines: each format and activation against float64 of dequantised weights, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.criterion import assert_close
from support.fake_gpu import FakeGpu
from support.serving import BF16, Held, Layer, held, interleaved, rounding, tokens
from torch import Tensor

from glulam import recipes
from glulam.integrations import serving
from glulam.integrations.serving import NotServed, ServedExperts, gate_of
from glulam.integrations.serving import weights as weights_module

pytest_plugins = ["support.fixtures"]

EXPERTS, HIDDEN, WIDTH, COUNT, K = 5, 160, 96, 19, 3
SILU = gate_of("silu")
FORMATS = {
    "bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "mxfp8_wide": "mxfp8_weight_only",
    "mxfp4": "mxfp4_weight_only", "mxfp4_fp8": "mxfp4", "mxfp4_fp8_wide": "mxfp4_weight_only",
    "nvfp4": "nvfp4_weight_only",
}  # fmt: skip
"""Recipe that the CPU uses for each format; scales of "..._wide" formats are too far apart to be folded."""


def made(kind: str, w13: Held, w2: Held, **options: Any) -> ServedExperts:
    build: Callable[..., ServedExperts] = getattr(ServedExperts, kind.removesuffix("_wide"))
    return build(*[part.clone() for part in (*w13.parts, *w2.parts)], **{"gate": SILU, **options})


def pair(kind: str, gated: bool = True, width: int = WIDTH) -> tuple[Held, Held]:
    """Return w13 and w2 in a format."""
    halves = 2 if gated else 1
    return (
        held(kind, EXPERTS, halves * width, HIDDEN, seed=1, halves=halves),
        held(kind, EXPERTS, HIDDEN, width, seed=2),
    )


def check(experts: Any, layer: Layer, k: int = K, on_rows: bool = False, factor: float = 1.0, **options: Any) -> Tensor:
    """Compare the call with float64, allowing for torch's own error in bfloat16; padded tokens must give 0."""
    given = tokens(COUNT, HIDDEN, EXPERTS, k)
    got = experts(given.x, given.ids, given.weights, weights_on_rows=on_rows, **options)
    assert got.shape == given.x.shape and got.dtype == BF16 and not got[COUNT:].any()
    exact, same = (factor * layer(given.x, given.ids, given.weights, dtype, on_rows) for dtype in (torch.float64, BF16))
    assert_close(got[:COUNT], exact[:COUNT], same[:COUNT], COUNT)
    return got


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_the_layer_of_its_dequantised_weights(kind: str, anywhere: Any) -> None:
    w13, w2 = pair(kind)
    experts = made(kind, w13, w2)
    assert experts.recipe.name == FORMATS[kind] and experts.num_experts == EXPERTS
    check(experts, Layer(w13.values, w2.values, rounds=rounding(FORMATS[kind])))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_first_call_may_be_captured(kind: str, fake_gpu: FakeGpu) -> None:
    """Nothing is left to prepare, which a captured call cannot."""
    experts = made(kind, *pair(kind))
    given = tokens(COUNT, HIDDEN, EXPERTS, K)[:3]
    fake_gpu.capturing, fake_gpu.stream = True, 5
    got = experts(*given)
    fake_gpu.capturing = False
    assert got.equal(experts(*given)) and got.any()


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_rows_of_gates_and_ups_may_be_interleaved(kind: str) -> None:
    w13, w2 = pair(kind)
    mixed = Held(tuple(map(interleaved, w13.parts)), interleaved(w13.values))
    gate = gate_of("swigluoai", interleaved=True, limit=2.0)
    bias = torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)
    experts = made(kind, mixed, w2, gate=gate, b13=bias[0], b2=bias[1])
    params = {"limit": 2.0, "alpha": 1.702, "offset": 1.0}
    rounded = [one.to(BF16).double() for one in bias]
    check(experts, Layer(mixed.values, w2.values, "clamped_swiglu", "interleaved", params, *rounded))


GATES = {
    "silu": ({}, "swiglu", {}),
    "gelu_tanh": ({}, "geglu", {}),
    "relu": ({}, "reglu", {}),
    "swigluoai_uninterleave": ({}, "clamped_swiglu", {"limit": 7.0, "alpha": 1.702, "offset": 1.0}),
    "swiglu": (
        {"alpha": 1.25, "beta": 0.5, "limit": 3.0}, "clamped_swiglu", {"limit": 3, "alpha": 1.25, "offset": 0.5},
    ),
    "situ": ({"beta": 2.0, "linear": 3.0}, "situ", {"gate_cap": 2.0, "up_cap": 3.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_gates_compute_what_engines_call_so(name: str) -> None:
    numbers, activation, params = GATES[name]
    w13, w2 = pair("bf16")
    check(made("bf16", w13, w2, gate=gate_of(name, **numbers)), Layer(w13.values, w2.values, activation, params=params))


def test_silu_with_a_limit_alone_is_clamped_before_it() -> None:
    w13, w2 = pair("bf16")
    params = {"limit": 1.5, "alpha": 1.0, "offset": 0.0}
    layer = Layer(w13.values, w2.values, "clamped_swiglu", params=params)
    got = check(made("bf16", w13, w2, gate=gate_of("silu", limit=1.5)), layer)
    plain = check(made("bf16", w13, w2), Layer(w13.values, w2.values))
    assert (got - plain).abs().max() > 0.1


def test_situ_without_linear_caps_the_gate_alone() -> None:
    w13, w2 = pair("bf16")
    layer = Layer(w13.values, w2.values, "situ", params={"gate_cap": 2.0, "up_cap": None})
    check(made("bf16", w13, w2, gate=gate_of("situ", beta=2.0)), layer)


@pytest.mark.parametrize(("name", "activation"), [("silu", "silu"), ("gelu", "gelu"), ("relu2", "srelu")])
@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "nvfp4"])
def test_experts_without_a_gate(kind: str, name: str, activation: str) -> None:
    w13, w2 = pair(kind, gated=False)
    experts = made(kind, w13, w2, gate=gate_of(name, gated=False))
    check(experts, Layer(w13.values, w2.values, activation, rounds=rounding(FORMATS[kind])))


def test_halves_of_fp8_blocks_may_end_inside_a_block_or_at_one() -> None:
    for width in (96, 128, 160):
        w13, w2 = pair("fp8_block", width=width)
        check(made("fp8_block", w13, w2), Layer(w13.values, w2.values, rounds=rounding("fp8_block")))


def test_fp8_block_scales_may_be_powers_of_two_in_bytes() -> None:
    w13, w2 = pair("fp8_block")
    powers = [torch.randint(116, 122, one.parts[1].shape, dtype=torch.uint8) for one in (w13, w2)]
    floats = [torch.exp2(one.float() - 127) for one in powers]
    in_bytes, as_floats = (
        made("fp8_block", Held((w13.parts[0], first), w13.values), Held((w2.parts[0], second), w2.values))
        for first, second in (powers, floats)
    )
    given = tokens(COUNT, HIDDEN, EXPERTS, K)[:3]
    assert in_bytes(*given).equal(as_floats(*given)) and in_bytes(*given).any()


def test_mxfp4_scales_may_be_float32_powers_of_two() -> None:
    """As SGLang holds those of DeepSeek-V4."""
    w13, w2 = pair("mxfp4")
    wide = [Held((one.parts[0], one.parts[1].float()), one.values) for one in (w13, w2)]
    assert wide[0].parts[1].dtype == torch.float32
    check(made("mxfp4", *wide), Layer(w13.values, w2.values))
    wide[1].parts[1][2, 3, 1] *= 1.5
    with pytest.raises(NotServed, match="w2's MXFP4 scales"):
        made("mxfp4", *wide)


@pytest.mark.parametrize("equal", [True, False])
def test_halves_may_have_global_scales_of_their_own(equal: bool) -> None:
    w13, w2 = pair("nvfp4")
    factors = w13.parts[2].clone()
    assert factors.shape == (EXPERTS, 2) and (factors[:, 0] != factors[:, 1]).all()
    values = w13.values
    if equal:
        values = values * (factors[:, :1] / factors).double().repeat_interleave(WIDTH, dim=1)[:, :, None]
        factors[:, 1] = factors[:, 0]
    experts = made("nvfp4", Held((*w13.parts[:2], factors), values), w2)
    assert experts.w1.global_scale.dim() == (1 if equal else 2)
    check(experts, Layer(values, w2.values))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4"])
def test_elements_are_prepared_where_they_lie_and_again_after_they_were_loaded_again(kind: str) -> None:
    w13, w2 = pair(kind)
    parts = [part.clone() for part in (*w13.parts, *w2.parts)]
    build = getattr(ServedExperts, kind)
    given = tokens(COUNT, HIDDEN, EXPERTS, K)[:3]
    first = build(*parts, gate=SILU)
    addresses = [first.w1.data.data_ptr(), first.w2.data.data_ptr()]
    elements = [parts[0], parts[len(parts) // 2]]
    assert addresses == [one.data_ptr() for one in elements]
    before = first(*given)
    assert not elements[0].view(torch.uint8).equal(w13.parts[0].view(torch.uint8))
    for one, source in zip(elements, (w13.parts[0], w2.parts[0]), strict=True):
        one.copy_(source)
    assert build(*parts, gate=SILU)(*given).equal(before) and before.any()


def test_a_weight_that_cannot_be_folded_is_left_as_it_was() -> None:
    narrow, wide = pair("mxfp8")[0], pair("mxfp8_wide")[1]
    parts = [part.clone() for part in (*narrow.parts, *wide.parts)]
    experts = ServedExperts.mxfp8(*parts, gate=SILU)
    assert experts.recipe is recipes.MXFP8_WEIGHT_ONLY
    assert parts[0].view(torch.uint8).equal(narrow.parts[0].view(torch.uint8))


def test_mxfp4_elements_for_rows_in_fp8_are_a_view() -> None:
    w13, w2 = pair("mxfp4_fp8")
    parts = [part.clone() for part in (*w13.parts, *w2.parts)]
    experts = ServedExperts.mxfp4_fp8(*parts, gate=SILU)
    assert experts.w1.data.data_ptr() == parts[0].data_ptr() and experts.w2.data.data_ptr() == parts[2].data_ptr()
    assert parts[0].equal(w13.parts[0]) and parts[2].equal(w2.parts[0])


@pytest.mark.parametrize(
    ("value", "default", "kind"),
    [(None, "bf16", "mxfp4"), ("", "fp8", "mxfp4_fp8"), ("BF16", "fp8", "mxfp4"), (" fp8", "bf16", "mxfp4_fp8")],
)
def test_a_variable_says_how_rows_are_multiplied_by_mxfp4(
    monkeypatch: pytest.MonkeyPatch, value: str | None, default: str, kind: str
) -> None:
    monkeypatch.delenv("GLULAM_MXFP4_ROWS", raising=False)
    if value is not None:
        monkeypatch.setenv("GLULAM_MXFP4_ROWS", value)
    assert serving.mxfp4_kind(default) == kind
    monkeypatch.setenv("GLULAM_MXFP4_ROWS", "int8")
    with pytest.raises(ValueError, match="GLULAM_MXFP4_ROWS is 'int8'; give bf16 or fp8"):
        serving.mxfp4_kind(default)


def test_where_no_kernels_quantise_rows_weights_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "has_kernels", lambda recipe, weight: False)
    for kind in ("fp8_block", "mxfp8", "mxfp4_fp8"):
        w13, w2 = pair(kind)
        experts = made(kind, w13, w2)
        assert experts.recipe.name == f"{kind.removesuffix('_fp8')}_weight_only"
        values = [one.values.to(BF16).double() for one in (w13, w2)]
        check(experts, Layer(*values))


# The call -------------------------------------------------------------------------------------------------------------


def test_global_ids_go_through_a_map_that_is_not_contiguous() -> None:
    w13, w2 = pair("bf16")
    experts, layer = made("bf16", w13, w2), Layer(w13.values, w2.values)
    here = [11, 3, 7, 0, 8]  # the global id of each expert here
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(EXPERTS, dtype=torch.int32)
    x, local, weights, _ = tokens(COUNT, HIDDEN, EXPERTS, K)
    ids = torch.where(local < 0, local, torch.tensor(here, dtype=torch.int32)[local.clamp(min=0)])
    ids[1:COUNT:3, 1] = 5  # nobody's here
    local[1:COUNT:3, 1] = -1
    got = experts(x, ids, weights, expert_map=expert_map)
    assert got.equal(experts(x, local, weights)) and ids.dtype == torch.int32
    exact, same = (layer(x, local, weights, dtype)[:COUNT] for dtype in (torch.float64, BF16))
    assert_close(got[:COUNT], exact, same, COUNT)


def test_a_map_of_another_shape_is_refused() -> None:
    w13, w2 = pair("bf16")
    x, ids, weights, _ = tokens(2, HIDDEN, EXPERTS, K)
    with pytest.raises(ValueError, match="expert_map has shape"):
        made("bf16", w13, w2)(x, ids, weights, expert_map=torch.zeros(2, 3, dtype=torch.int32))


def test_scale_multiplies_weights() -> None:
    w13, w2 = pair("bf16")
    check(made("bf16", w13, w2), Layer(w13.values, w2.values), factor=2.5, scale=2.5)


def test_weights_may_be_of_16_bits() -> None:
    w13, w2 = pair("bf16")
    x, ids, weights, _ = tokens(COUNT, HIDDEN, EXPERTS, K)
    experts, weights = made("bf16", w13, w2), weights.to(BF16)
    for scale in (1.0, 3.0):
        assert experts(x, ids, weights, scale=scale).equal(experts(x, ids, weights.float() * scale))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_weights_may_multiply_rows_before_the_first_gemm(scale: float) -> None:
    w13, w2 = pair("bf16")
    check(made("bf16", w13, w2), Layer(w13.values, w2.values), k=1, on_rows=True, factor=scale, scale=scale)


def test_weights_on_rows_of_several_experts_are_refused() -> None:
    w13, w2 = pair("bf16")
    x, ids, weights, _ = tokens(2, HIDDEN, EXPERTS, K)
    with pytest.raises(NotServed, match="3 experts a token"):
        made("bf16", w13, w2)(x, ids, weights, weights_on_rows=True)


def test_a_result_goes_into_a_buffer() -> None:
    for kind in FORMATS:
        experts = made(kind, *pair(kind))
        x, ids, weights, _ = tokens(COUNT, HIDDEN, EXPERTS, K)
        out = torch.full_like(x, torch.nan)
        assert experts(x, ids, weights, out=out) is out
        assert out.equal(experts(x, ids, weights)) and out.any()


@pytest.mark.parametrize("kind", FORMATS)
def test_no_tokens_and_tokens_without_experts(kind: str) -> None:
    experts = made(kind, *pair(kind))
    x, ids, weights, _ = tokens(4, HIDDEN, EXPERTS, K, padding=0)
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    assert not experts(x, torch.full_like(ids, -1), weights).any()


def test_weights_are_views_of_the_engines_in_16_bits_and_fp8_blocks() -> None:
    for kind in ("bf16", "fp8_block"):
        w13, w2 = pair(kind)
        build = getattr(ServedExperts, kind)
        experts = build(*[torch.nn.Parameter(one, requires_grad=False) for one in (*w13.parts, *w2.parts)], gate=SILU)
        first = experts.w1 if kind == "bf16" else experts.w1.data
        assert first.data_ptr() == w13.parts[0].data_ptr() and not first.requires_grad


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gelu"}, "exact by erf"),
        ({"name": "tanh"}, "'tanh'; served are silu, swiglu"),
        ({"name": "relu2"}, "gated activation 'relu2'"),
        ({"name": "relu", "gated": False}, "'relu' without a gate; served are silu, gelu, relu2"),
        ({"name": "silu", "gated": False, "limit": 7.0}, "without a gate with limit 7.0"),
        ({"name": "silu", "alpha": 1.7}, "with alpha 1.7 but without a limit"),
        ({"name": "silu", "linear": 1.7}, "with linear 1.7; it takes alpha, beta, limit"),
        ({"name": "gelu_tanh", "limit": 7.0}, "with limit 7.0; it takes no numbers"),
        ({"name": "situ", "limit": 7.0, "beta": 4.0}, "with limit 7.0; it takes beta, linear"),
        ({"name": "situ"}, "'situ' without beta"),
    ],
)
def test_activations_that_glulam_lacks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotServed, match=message):
        gate_of(**options)


def test_widths_and_dtypes_without_kernels_are_refused() -> None:
    narrow = held("bf16", 2, 48, 40), held("bf16", 2, 40, 24)
    fp8 = [one.values.to(torch.float8_e4m3fn) for one in narrow]
    scales = [torch.ones(2, 2, 1), torch.ones(2, 1, 1)]
    with pytest.raises(NotServed, match="H is 40; recipe 'fp8_block' takes multiples of 16"):
        ServedExperts.fp8_block(fp8[0], scales[0], fp8[1], scales[1], gate=SILU)
    for kind in ("mxfp8", "mxfp4", "nvfp4"):
        w13, w2 = pair(kind)
        parts = (*w13.parts, *w2.parts)
        with pytest.raises(NotServed, match="float32"):
            getattr(ServedExperts, kind)(*parts, gate=SILU, dtype=torch.float32)
    w13, w2 = pair("mxfp4")
    with pytest.raises(NotServed, match="takes bfloat16"):
        made("mxfp4", w13, w2, dtype=torch.float16)
    with pytest.raises(NotServed, match="torch.int32"):
        ServedExperts.bf16(torch.zeros(1, 8, 8, dtype=torch.int32), torch.zeros(1, 8, 8, dtype=torch.int32), gate=SILU)


def test_widths_of_16_bits_are_refused_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    w13, w2 = (torch.zeros(2, 20, 12, dtype=BF16), torch.zeros(2, 12, 10, dtype=BF16))
    assert ServedExperts.bf16(w13, w2, gate=SILU).num_experts == 2
    monkeypatch.setattr(weights_module, "runs_kernels", lambda tensor: True)
    with pytest.raises(NotServed, match="H = 12 and I = 10; kernels read multiples of 8"):
        ServedExperts.bf16(w13, w2, gate=SILU)
    with pytest.raises(NotServed, match="torch.float32"):
        ServedExperts.bf16(w13.float(), w2.float(), gate=SILU)


def test_global_scales_of_halves_need_a_gate_over_ups() -> None:
    w13, w2 = pair("nvfp4")
    with pytest.raises(NotServed, match="global scales differ"):
        made("nvfp4", w13, w2, gate=gate_of("silu", interleaved=True))
    with pytest.raises(NotServed, match="global scales have shape"):
        made("nvfp4", Held((*w13.parts[:2], torch.ones(EXPERTS, 2, 1)), w13.values), w2)


@pytest.mark.parametrize("kind", weights_module.RECIPES)
def test_a_plugin_can_ask_before_weights_are_loaded(kind: str) -> None:
    """By shapes and dtypes alone, of weights that may be on the meta device."""
    like = torch.empty(2, 64, 64, device="meta")
    assert serving.served_recipe(kind, 64, 96, BF16, like).name == FORMATS[kind]
    if kind != "bf16":
        with pytest.raises(NotServed, match="I is 40"):
            serving.served_recipe(kind, 64, 40, BF16, like)
