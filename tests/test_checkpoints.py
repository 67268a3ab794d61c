"""load_experts: hand-made checkpoints load to their values in float64; damaged ones are refused by name."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support import oracle
from support.checkpoints import E4M3, E8M0, KINDS, Checkpoint, checkpoint
from support.criterion import assert_close
from support.inputs import matrix
from torch import Tensor

import glulam
from glulam import load_experts
from glulam.formats.checkpoint_names import DIALECTS

each_kind = pytest.mark.parametrize("kind", KINDS)
EXPERTS = 3


def loaded(c: Checkpoint, **options: Any) -> tuple[Any, Any]:
    return load_experts(c.state, c.prefix, EXPERTS, **options)


def assert_values(weight: Any, values: Tensor) -> None:
    """Check that a weight dequantises to `values`, up to float32 rounding of a product of three factors."""
    assert weight.shape == values.shape and (values.abs().amax(dim=(1, 2)) > 0.1).all()
    made = weight.dequantize().double()
    assert torch.equal(made == 0, values == 0)
    assert float(((made - values).abs() / values.abs().clamp(min=1e-30)).max()) < 3e-7


# Loading --------------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("width", [96, 128, 160])
def test_values(kind: str, width: int) -> None:
    c = checkpoint(KINDS[kind], width=width)
    w1, w2 = loaded(c)
    assert type(w1).__name__ == type(w2).__name__ == KINDS[kind].tensor
    assert_values(w1, c.w1)
    assert_values(w2, c.w2)
    assert all(part.is_contiguous() for w in (w1, w2) for part in w.parts if part is not None)


@each_kind
@pytest.mark.parametrize("width", [96, 160])
def test_operators_take_them(kind: str, width: int) -> None:
    c = checkpoint(KINDS[kind], width=width)
    sizes = [5, 0, 12]
    x = matrix(17, 160, torch.bfloat16, "cpu", 1)
    y = glulam.grouped_mlp(x, *loaded(c), splits=sizes, recipe=KINDS[kind].recipe)
    values = [w.float().bfloat16() if "fp8_block" in KINDS[kind].recipe else w for w in (c.w1, c.w2)]
    exact, same = (oracle.grouped_mlp(x, *values, [5, 5, 17], dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    assert_close(y, exact, same, 17)


@each_kind
def test_bytes_are_the_checkpoints(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    gate, up, down = KINDS[kind].projections
    w1, w2 = loaded(c)
    for expert in range(EXPERTS):
        for weight, rows, projection in ((w1, slice(96), gate), (w1, slice(96, None), up), (w2, slice(None), down)):
            key = f"{c.prefix}.{expert}.{projection}.weight"
            data = c.state[key] if key in c.state else c.state[f"{key}_packed"]
            assert torch.equal(weight.data[expert, rows].view(torch.uint8), data.view(torch.uint8))


@each_kind
def test_the_mapping_is_not_changed(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    before = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in c.state.items()}
    w1, w2 = loaded(c)
    for part in (*w1.parts, *w2.parts):
        if part is not None:
            part.view(torch.uint8).fill_(0)
    assert list(c.state) == list(before)
    for name, (tensor, copy, version) in before.items():
        assert c.state[name] is tensor and tensor._version == version
        assert torch.equal(tensor.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8))


@each_kind
def test_some_experts_in_any_order(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    w1, w2 = loaded(c, experts=[2, 0])
    assert_values(w1, c.w1[[2, 0]])
    assert_values(w2, c.w2[[2, 0]])
    for name in [name for name in c.state if f"{c.prefix}.1." in name]:
        del c.state[name]
    assert_values(loaded(c, experts=range(2, 3))[0], c.w1[2:])


@each_kind
def test_memory_in_another_order(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    state = {name: t.mT.contiguous().mT if t.dim() == 2 else t for name, t in c.state.items()}
    assert not all(t.is_contiguous() for t in state.values())
    assert_values(load_experts(state, f"{c.prefix}.", EXPERTS)[0], c.w1)


class FromFile(Mapping[str, Tensor]):
    """A state dict that loads tensors on request, and counts requests by name."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.asked = state, dict.fromkeys(state, 0)

    def __getitem__(self, name: str) -> Tensor:
        self.asked[name] += 1
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def test_a_mapping_that_reads_files() -> None:
    c = checkpoint(KINDS["modelopt-nvfp4"])
    state = FromFile(c.state)
    assert_values(load_experts(state, c.prefix, EXPERTS)[0], c.w1)
    assert max(state.asked.values()) <= 3, "each is read once, those that tell the format and the device again"
    assert sum(state.asked.values()) < 1.3 * 9 * 3 + 3
    assert not any(state.asked[name] for name in c.state if "input_scale" in name or not name.startswith(c.prefix))


@pytest.mark.parametrize("kind", ["modelopt-nvfp4", "compressed-nvfp4"])
def test_global_scales_of_a_gate_and_an_up_projection(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    assert loaded(c)[0].global_scale.shape == (EXPERTS, 2) and loaded(c)[1].global_scale.shape == (EXPERTS,)
    (name,) = {name.rpartition(".")[2] for name in c.state if name.endswith(("_scale_2", "weight_global_scale"))}
    for expert in range(EXPERTS):  # as one: up's values become gate's times what they were
        gate, up = (f"{c.prefix}.{expert}.{projection}.{name}" for projection in ("gate_proj", "up_proj"))
        ratio = (c.state[gate] / c.state[up]).double()
        c.w1[expert, 96:] *= ratio if kind == "modelopt-nvfp4" else 1 / ratio
        c.state[up] = c.state[gate].clone().view(1)  # compressed-tensors stores them so
    w1, _ = loaded(c)
    assert w1.global_scale.shape == (EXPERTS,)
    assert_values(w1, c.w1)


@pytest.mark.parametrize("kind", ["deepseek-v4", "minimax-m3", "compressed-mxfp8"])
def test_scales_as_bytes_or_as_powers(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    for dtype in (torch.uint8, E8M0):
        scales = (name for name in c.state if "scale" in name and name.startswith(c.prefix))
        c.state.update({name: c.state[name].view(dtype) for name in scales})
        assert_values(loaded(c)[0], c.w1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_block_scales_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    c = checkpoint(KINDS["qwen3-fp8"])
    scales = {name: t.to(dtype) for name, t in c.state.items() if "scale" in name}
    c.state.update(scales)
    w1, w2 = loaded(c)
    c.state.update({name: t.float() for name, t in scales.items()})
    for made, wanted in zip((w1, w2), loaded(c), strict=True):
        assert torch.equal(made.scale, wanted.scale) and made.scale.dtype == torch.float32


def test_elements_as_unsigned_bytes() -> None:
    c = checkpoint(KINDS["deepseek-v4"])
    c.state.update({n: t.view(torch.uint8) for n, t in c.state.items() if t.dtype == torch.int8})
    assert_values(loaded(c)[1], c.w2)


def test_the_device_of_the_result() -> None:
    c = checkpoint(KINDS["qwen3-fp8"])
    assert loaded(c, device="cpu")[0].device.type == "cpu"


def test_no_two_dialects_have_the_same_names_and_dtypes() -> None:
    for one in DIALECTS:
        for other in DIALECTS:
            if one is not other and one.parts.keys() == other.parts.keys():
                apart = (set(dtypes).isdisjoint(other.parts[name]) for name, dtypes in one.parts.items())
                assert any(apart), (one.name, other.name)


# Refusals -------------------------------------------------------------------------------------------------------------

Damage = Callable[[dict[str, Tensor], str], Any]
"""To a state, given what the names of experts begin with."""


def drop(name: str) -> Damage:
    return lambda state, start: state.pop(start + name)


def drop_all(text: str) -> Damage:
    return lambda state, start: [state.pop(name) for name in list(state) if name.startswith(start + text)]


def change(name: str, make: Callable[[Tensor], Any]) -> Damage:
    return lambda state, start: state.update({start + name: make(state[start + name])})


def fill(name: str, place: tuple[int, ...], byte_or_number: float) -> Damage:
    """Return a damage that sets one element of a tensor to a number, or to a byte if elements have 8 bits."""

    def damage(state: dict[str, Tensor], start: str) -> None:
        part = state[start + name]
        (part.view(torch.uint8) if part.itemsize == 1 else part)[place] = byte_or_number  # type: ignore[assignment]

    return damage


def swap(one: str, other: str) -> Damage:
    return lambda state, start: state.update({start + one: state[start + other], start + other: state[start + one]})


def add(name: str, like: str) -> Damage:
    return lambda state, start: state.update({start + name: state[start + like].clone()})


FP8, NVFP4, MXFP4, MXFP8 = "qwen3-fp8", "modelopt-nvfp4", "deepseek-v4", "minimax-m3"
REFUSED: dict[str, tuple[str, Damage, str]] = {
    "an expert": (FP8, drop_all("1."), r"1 of the experts at prefix 'model.*experts' are missing; give all tensors"),
    "a scale": (
        FP8, drop("2.down_proj.weight_scale_inv"),
        r"model.*\.2\.down_proj\.weight_scale_inv is missing, which other experts have",
    ),
    "a weight": (NVFP4, drop("1.up_proj.weight"), r"\.1\.up_proj\.weight is missing"),
    "a projection": (MXFP4, drop_all("2.w3."), r"\.2\.w3\.(scale|weight) is missing"),
    "a projection of all": (
        MXFP4, lambda state, start: [drop_all(f"{e}.w3.")(state, start) for e in range(EXPERTS)],
        r"have the projections w1, w2; known are gate_proj, up_proj, down_proj, or w1, w3, w2",
    ),
    "a truncated scale": (
        FP8, change("1.gate_proj.weight_scale_inv", lambda t: t[:, :1]),
        r"\.1\.gate_proj\.weight_scale_inv has shape \[2, 1\]; the scales of a weight \[160, 160\] in FP8 blocks.* are "
        r"\[2, 2\], so it is truncated, or another tensor's",
    ),
    "a scale of one dimension": (
        NVFP4, change("0.up_proj.weight_scale", torch.flatten), r"\.0\.up_proj\.weight_scale has shape \[1600\]",
    ),
    "swapped scales": (
        NVFP4, swap("0.gate_proj.weight_scale", "0.down_proj.weight_scale"),
        r"\.0\.gate_proj\.weight_scale has shape \[160, 6\]; the scales of a weight \[96, 160\] .* are \[96, 10\]",
    ),
    "a weight as its scale": (
        FP8, swap("1.gate_proj.weight", "1.gate_proj.weight_scale_inv"),
        r"\.1\.gate_proj\.weight is torch.float32; in FP8 blocks of .* it is torch.float8_e4m3fn, and parts are never",
    ),
    "a truncated weight": (
        MXFP4, change("1.w3.weight", lambda t: t[:-1]), r"\.1\.w3\.scale has shape \[160, 5\].* are \[159, 5\]",
    ),
    "a smaller expert": (
        MXFP8, lambda state, start: [
            change(f"1.w1.{part}", lambda t: t[:96])(state, start) for part in ("weight", "weight_scale_inv")
        ],
        r"\.1\.w1\.weight has shape \[96, 160\], but .*\.0\.w1\.weight \[160, 160\]; .* are alike",
    ),
    "another up-projection": (
        MXFP8, lambda state, start: [
            change(f"0.w3.{part}", lambda t: t[:96])(state, start) for part in ("weight", "weight_scale_inv")
        ],
        r"\.0\.w3\.weight has shape \[96, 160\], but .*\.0\.w1\.weight \[160, 160\]",
    ),
    "a down-projection of another width": (
        MXFP8, lambda state, start: [
            change(f"{e}.w2.{part}", lambda t: t[:, : t.shape[1] * 4 // 5])(state, start)
            for e in range(EXPERTS) for part in ("weight", "weight_scale_inv")
        ],
        r"\.0\.w2\.weight is of 128 columns, but .*\.0\.w1\.weight of 160 rows, and both are I",
    ),
    "a weight of three dimensions": (
        FP8, change("0.gate_proj.weight", lambda t: t[None]), r"\.0\.gate_proj\.weight has shape \[1, 160, 160\]; give",
    ),
    "an empty weight": (FP8, change("0.up_proj.weight", lambda t: t[:0]), r"up_proj\.weight has shape \[0, 160\]"),
    "16-bit weights with scales": (
        FP8, lambda state, start: [
            change(f"{e}.{p}_proj.weight", lambda t: t.to(torch.bfloat16))(state, start)
            for e in range(EXPERTS) for p in ("gate", "up", "down")
        ],
        r"\.0\.gate_proj\.weight is torch.bfloat16, .*weight_scale_inv is torch.float32; by these names there are FP8 "
        r"blocks of DeepSeek-V3, Qwen3: weight \(torch.float8_e4m3fn\).*; MXFP8 of MiniMax-M3",
    ),
    "a scale of another dtype": (
        NVFP4, change("2.down_proj.weight_scale", lambda t: t.float()),
        r"\.2\.down_proj\.weight_scale is torch.float32; in NVFP4 of modelopt it is torch.float8_e4m3fn",
    ),
    "no tensor": (NVFP4, change("1.up_proj.weight_scale", lambda t: t.tolist()), r"weight_scale is a list; give"),
    "a meta tensor": (MXFP4, change("1.w1.weight", lambda t: t.to("meta")), r"\.1\.w1\.weight is on the meta device"),
    "a NaN scale": (
        FP8, fill("1.up_proj.weight_scale_inv", (1, 0), torch.nan),
        r"\.1\.up_proj\.weight_scale_inv has a scale that is NaN, infinite or negative; mend the checkpoint",
    ),
    "an infinite scale": (FP8, fill("2.down_proj.weight_scale_inv", (0, 0), torch.inf), r"\.2\.down_proj.* infinite"),
    "a negative scale": (FP8, fill("0.gate_proj.weight_scale_inv", (0, 1), -0.5), r"\.0\.gate_proj.* negative"),
    "a NaN power": (MXFP4, fill("1.w2.scale", (3, 1), 255), r"\.1\.w2\.scale has a scale that is NaN"),
    "a NaN power of MXFP8": (MXFP8, fill("2.w3.weight_scale_inv", (3, 1), 255), r"\.2\.w3\.weight_scale_inv has"),
    "a NaN in E4M3": (NVFP4, fill("1.gate_proj.weight_scale", (5, 2), 127), r"\.1\.gate_proj\.weight_scale has"),
    "a negative in E4M3": (NVFP4, fill("1.down_proj.weight_scale", (5, 2), 0x90), r"\.1\.down_proj\.weight_scale has"),
    "a global scale of 0": (
        NVFP4, change("1.up_proj.weight_scale_2", torch.zeros_like),
        r"\.1\.up_proj\.weight_scale_2 is 0, negative, NaN or infinite; a global scale is positive, so mend",
    ),
    "a NaN global scale": (
        NVFP4, change("2.down_proj.weight_scale_2", lambda t: t * torch.nan), r"\.2\.down_proj\.weight_scale_2 is 0",
    ),
    "a negative global scale": (
        "compressed-nvfp4", change("0.gate_proj.weight_global_scale", torch.neg), r"gate_proj\.weight_global_scale is",
    ),
    "an infinite global scale": (
        "compressed-nvfp4", change("0.down_proj.weight_global_scale", lambda t: t * torch.inf), r"global_scale is 0",
    ),
    "a global scale without a reciprocal": (
        "compressed-nvfp4", change("0.down_proj.weight_global_scale", lambda t: t * 0 + 1e-39), r"global_scale is 0",
    ),
    "a global scale for each row": (
        NVFP4, change("0.gate_proj.weight_scale_2", lambda t: t.expand(160)), r"has shape \[160\]; it is one number",
    ),
    "a global scale of another dtype": (
        NVFP4, change("0.down_proj.weight_scale_2", lambda t: t.double()), r"weight_scale_2 is torch.float64",
    ),
    "names of two dialects": (
        FP8, lambda state, start: [
            add("1.gate_proj.weight_scale", "1.gate_proj.weight_scale_inv")(state, start),
            drop("1.gate_proj.weight_scale_inv")(state, start),
        ],
        r"experts\.0\..*weight_scale_inv', '.*experts\.1\.gate_proj\.weight_scale' do not belong together: names of "
        r"several formats are mixed, .* formats have weight and weight_scale_inv, or weight and scale, or",
    ),
    "parts of two dialects": (
        NVFP4, add("0.gate_proj.weight_packed", "0.gate_proj.weight"), r"weight_packed.* of several formats are mixed",
    ),
    "projections of two dialects": (
        FP8, add("0.w1.weight", "0.gate_proj.weight"), r"have the projections down_proj, gate_proj, up_proj, w1; known",
    ),
    "an unknown part": (
        FP8, add("0.gate_proj.bias", "0.gate_proj.weight"),
        r"\.0\.gate_proj\.bias' has a name that no known format of weights has; give a mapping without it",
    ),
    "no scales": (
        FP8, lambda state, start: [state.pop(name) for name in list(state) if "scale" in name],
        r"\.0\.\w+_proj\.weight has no scales beside it; give all tensors of the layer",
    ),
    "no global scales": (
        NVFP4, lambda state, start: [state.pop(name) for name in list(state) if name.endswith("_2")],
        r"\.0\.gate_proj\.weight is torch.uint8, .*weight_scale is torch.float8_e4m3fn; by these names there are FP8",
    ),
    "more experts": (FP8, add("7.gate_proj.weight", "0.gate_proj.weight"), r"num_experts is 3, but there is .* 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_checkpoints_are_refused_by_name(name: str) -> None:
    kind, damage, message = REFUSED[name]
    c = checkpoint(KINDS[kind], width=96 if name == "swapped scales" else 160)
    load_experts(c.state, c.prefix, EXPERTS)
    damage(c.state, f"{c.prefix}.")
    before = dict(c.state)
    with pytest.raises((ValueError, TypeError)) as raised:
        load_experts(c.state, c.prefix, EXPERTS)
    text = str(raised.value)
    assert text.startswith("load_experts: ") and re.search(message, text), text
    assert list(c.state) == list(before) and all(c.state[key] is value for key, value in before.items())


@pytest.mark.parametrize(
    ("kind", "hidden", "message"),
    [
        (FP8, 152, r"rows of 152 elements; kernels take multiples of 16"),
        (NVFP4, 80, r"rows of 80 elements; kernels take multiples of 32, so dequantise it, and pad it"),
    ],
)
def test_rows_of_no_whole_blocks(kind: str, hidden: int, message: str) -> None:
    c = checkpoint(KINDS[kind], hidden=hidden)
    with pytest.raises(ValueError, match=message):
        loaded(c)


def test_a_prefix_without_experts() -> None:
    c = checkpoint(KINDS[FP8])
    for layer in range(5, 12):
        c.state[f"model.layers.{layer}.mlp.experts.0.gate_proj.weight"] = torch.zeros(1)
    with pytest.raises(ValueError) as raised:
        load_experts(c.state, "model.layers.3.mlp", EXPERTS)
    text = str(raised.value)
    assert text.startswith("load_experts: there is no expert at prefix 'model.layers.3.mlp'; there are experts at ")
    assert "at 'model.layers.3.mlp.experts', " in text, "what begins like it comes first"
    assert text.endswith(" and 5 more")
    with pytest.raises(ValueError, match="nor anywhere else in the mapping"):
        load_experts({"model.norm.weight": torch.ones(1)}, "", EXPERTS)


def test_names_at_the_top() -> None:
    c = checkpoint(KINDS[MXFP4])
    start = f"{c.prefix}."
    state = {name.removeprefix(start): t for name, t in c.state.items() if name.startswith(start)}
    assert_values(load_experts(state, "", EXPERTS)[0], c.w1)
    with pytest.raises(ValueError, match=r"no expert at prefix 'x'; there are experts at ''"):
        load_experts(state, "x", EXPERTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": []}, "state is a list; give a mapping"),
        ({"prefix": 3}, "prefix is a int; give a string"),
        ({"num_experts": 0}, "num_experts is 0; give a positive number"),
        ({"num_experts": "3"}, "num_experts is '3'"),
        ({"num_experts": 2}, "num_experts is 2, but there is an expert 2"),
        ({"num_experts": 6}, "3, 4, 5 of the experts .* are missing"),
        ({"num_experts": 9}, "3, 4, 5, 6 and 2 more of the experts .* are missing"),
        ({"experts": []}, r"experts is \[\]; give different numbers from 0 to 2"),
        ({"experts": [0, 0]}, r"experts is \[0, 0\]"),
        ({"experts": [3]}, r"experts is \[3\]"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    c = checkpoint(KINDS[FP8])
    given: dict[str, Any] = {"state": c.state, "prefix": c.prefix, "num_experts": EXPERTS, **options}
    with pytest.raises((ValueError, TypeError), match=f"load_experts: .*{message}"):
        load_experts(**given)


def test_formats_that_kernels_of_fp8_read_have_their_dtypes() -> None:
    w1, _ = loaded(checkpoint(KINDS[MXFP8]))
    assert (w1.data.dtype, w1.scale.dtype, w1.block) == (E4M3, E8M0, "1x32")


# State dicts ----------------------------------------------------------------------------------------------------------

FOUR_BITS = [name for name, kind in KINDS.items() if kind.recipe in ("mxfp4_weight_only", "nvfp4_weight_only")]
FP8_BLOCKS = [name for name, kind in KINDS.items() if kind.recipe == "fp8_block_weight_only"]


def module_of(kind: str, width: int = 96, **options: Any) -> glulam.nn.MoE:
    options = {"recipe": KINDS[kind].recipe, "dtype": torch.bfloat16, **options}
    return glulam.nn.MoE(160, width, EXPERTS, 2, **options).requires_grad_(False)


def bits_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's state, as bytes."""
    return {name: value.clone().flatten().view(torch.uint8) for name, value in module.state_dict().items()}


def assert_same_bits(module: torch.nn.Module, before: dict[str, Tensor]) -> None:
    after = bits_of(module)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in after)


def block_of(kind: str, c: Checkpoint) -> dict[str, Tensor]:
    """Return the state of one MoE block, including its router."""
    start = c.prefix.removesuffix("experts")
    state = {name.removeprefix(start): t for name, t in c.state.items() if name.startswith(start)}
    return {**state, "gate.weight": torch.randn(EXPERTS, 160)}


def equalise(c: Checkpoint) -> None:
    """Give gate and up-projection the same global scale."""
    for name in list(c.state):
        if name.endswith(("_scale_2", "weight_global_scale")) and ".up_proj." in name:
            c.state[name] = c.state[name.replace(".up_proj.", ".gate_proj.")].clone()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("kind", "width"), [*((kind, 96) for kind in FOUR_BITS + FP8_BLOCKS), (FP8, 128), (FP8, 160), (FP8, 16)]
)
def test_a_module_loads_a_block_by_its_names(kind: str, width: int, assign: bool) -> None:
    c = checkpoint(KINDS[kind], width=width)
    module, state = module_of(kind, width), block_of(kind, c)
    before = dict(state)
    module.load_state_dict(state, assign=assign)
    assert list(state) == list(before)
    assert_values(module.experts.fc1.experts("weight"), c.w1)
    assert_values(module.experts.fc2.experts("weight"), c.w2)
    assert torch.equal(module.router.weight.float(), before["gate.weight"].to(module.router.weight.dtype).float())
    x = matrix(9, 160, torch.bfloat16, "cpu", 1)
    wanted = glulam.moe(x, module.route(x), *loaded(c), recipe=KINDS[kind].recipe)
    assert torch.equal(module(x), wanted) and wanted.abs().max() > 0.1
    again = module_of(kind, width)
    again.load_state_dict(module.state_dict(), assign=assign)
    assert torch.equal(again(x), wanted)
    nested = torch.nn.ModuleDict({"mlp": module_of(kind, width)})
    nested.load_state_dict({f"mlp.{name}": t for name, t in before.items()})
    assert torch.equal(nested["mlp"](x), wanted)


@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize("layout", ["interleaved", "interleaved32"])
def test_a_module_of_another_layout_loads_it(kind: str, layout: str) -> None:
    c = checkpoint(KINDS[kind])
    module = module_of(kind, glu_layout=layout)
    if "nvfp4" in kind:
        with pytest.raises(ValueError, match=f"different global scales, which rows in glu_layout '{layout}' cannot"):
            module.load_state_dict(block_of(kind, c))
        equalise(c)
    module.load_state_dict(block_of(kind, c))
    plain = module_of(kind)
    plain.load_state_dict({**block_of(kind, c), "gate.weight": module.router.weight})
    x = matrix(9, 160, torch.bfloat16, "cpu", 1)
    assert torch.allclose(module(x), plain(x), rtol=0.02) and module(x).abs().max() > 0.1


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_a_module_with_equal_global_scales(kind: str) -> None:
    c = checkpoint(KINDS[kind])
    equalise(c)
    module = module_of(kind)
    module.load_state_dict(block_of(kind, c))
    w1 = loaded(c)[0]
    assert torch.equal(module.experts.fc1.experts("weight").dequantize(), w1.dequantize())


def test_a_module_refuses_damaged_and_keeps_other_formats() -> None:
    c = checkpoint(KINDS[NVFP4])
    module = module_of(NVFP4)
    kept = {name: t.clone() for name, t in module.state_dict().items()}
    state = block_of(NVFP4, c)
    state["experts.1.up_proj.weight_scale"] = state["experts.1.up_proj.weight_scale"][:5]
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj\.weight_scale has shape \[5, 10\]"):
        module.load_state_dict(state)
    for kind in ("qwen3-fp8", "deepseek-v4"):
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*experts.fc1.weight"):
            module.load_state_dict(block_of(kind, checkpoint(KINDS[kind])))
    both = {**block_of(NVFP4, c), **module.state_dict()}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*experts\.\d\.\w+_proj\.weight"):
        module.load_state_dict(both)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) .*experts.fc1.bias"):
        module_of(NVFP4, bias=True).load_state_dict(block_of(NVFP4, c))
    for name, value in module.state_dict().items():
        same = name.startswith("router") or torch.equal(value.view(torch.uint8), kept[name].view(torch.uint8))
        assert same, name


def test_a_module_in_nvfp4_quantises_experts_in_16_bits_by_another_librarys_names() -> None:
    gate_up, down = torch.randn(EXPERTS, 192, 160) / 9, torch.randn(EXPERTS, 160, 96) / 9
    module = module_of(NVFP4)
    module.load_state_dict(
        {"gate.weight": torch.randn(EXPERTS, 160), "experts.gate_up_proj": gate_up, "experts.down_proj": down}
    )
    made = [layer.experts("weight").dequantize() for layer in (module.experts.fc1, module.experts.fc2)]
    gate, up = (glulam.quantize_nvfp4(half.contiguous()).dequantize() for half in gate_up.chunk(2, dim=1))
    assert torch.equal(made[0], torch.cat((gate, up), dim=1))
    assert torch.equal(made[1], glulam.quantize_nvfp4(down).dequantize())


# FP8 blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_block_weight_only"])
@pytest.mark.parametrize("width", [96, 128, 160])
def test_a_module_in_fp8_blocks_computes_its_checkpoint(recipe: str, width: int) -> None:
    c = checkpoint(KINDS[FP8], width=width)
    module = module_of(FP8, width, recipe=recipe)
    module.load_state_dict(block_of(FP8, c))
    x = matrix(17, 160, torch.bfloat16, "cpu", 1)
    y = module.experts(x, splits=[5, 0, 12])
    if recipe == "fp8_block":
        assert torch.equal(y, glulam.grouped_mlp(x, *loaded(c), splits=[5, 0, 12], recipe=recipe)) and y.abs().max() > 0
        return
    values = [w.float().bfloat16() for w in (c.w1, c.w2)]
    exact, same = (oracle.grouped_mlp(x, *values, [5, 5, 17], dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    assert_close(y, exact, same, 17)


@pytest.mark.parametrize("shared", ["shared_expert", "shared_experts"])
def test_a_shared_expert_in_fp8_blocks(shared: str) -> None:
    """As DeepSeek-V3's and Qwen3-Next's are shipped; also where it alone is in 16 bits."""
    c, other = checkpoint(KINDS[FP8]), checkpoint(KINDS[FP8], experts=1, width=144, seed=1)
    options: dict[str, Any] = {"shared_intermediate_size": 144}
    state = block_of(FP8, c) | {
        f"{shared}.{name.removeprefix(f'{other.prefix}.0.')}": value
        for name, value in other.state.items() if name.startswith(f"{other.prefix}.0.")
    }  # fmt: skip
    if shared == "shared_expert":
        options["shared_gate"], state["shared_expert_gate.weight"] = True, torch.randn(1, 160)
    else:
        options |= {"score": "sigmoid", "choice_bias": True}
        state["gate.e_score_correction_bias"] = torch.rand(EXPERTS)
    module = module_of(FP8, **options)
    module.load_state_dict(state)
    assert module.shared is not None
    assert_values(module.shared.fc1.experts("weight"), other.w1)
    assert_values(module.shared.fc2.experts("weight"), other.w2)
    assert_values(module.experts.fc1.experts("weight"), c.w1)
    before = bits_of(module)
    broken = state | {f"{shared}.up_proj.weight_scale_inv": torch.full((2, 2), torch.nan)}
    with pytest.raises(ValueError, match=rf" {shared}\.up_proj\.weight_scale_inv has a scale that is NaN"):
        module.load_state_dict(broken)
    del broken[f"{shared}.up_proj.weight_scale_inv"]
    with pytest.raises(ValueError, match=rf" {shared}\.up_proj\.weight_scale_inv is missing"):
        module.load_state_dict(broken)
    assert_same_bits(module, before)
    wide = {name: value for name, value in state.items() if not name.startswith(f"{shared}.")}
    gate, up = other.w1[0].bfloat16().chunk(2)
    projections = {"gate_proj": gate, "up_proj": up, "down_proj": other.w2[0].bfloat16()}
    module.load_state_dict(wide | {f"{shared}.{name}.weight": value for name, value in projections.items()})
    made = glulam.quantize_fp8_block(other.w1.bfloat16(), in_halves=True)
    assert torch.equal(module.shared.fc1.experts("weight").dequantize(), made.dequantize())


NAMED_BY_TORCH = ("names of two dialects", "an unknown part")
"""Damages that leave names of parts which no format has."""


@pytest.mark.parametrize("name", [name for name, (kind, _, _) in REFUSED.items() if kind == FP8])
def test_a_module_in_fp8_blocks_refuses_damaged_checkpoints(name: str) -> None:
    """By the name of the tensor, before anything is loaded; the dictionary stays as it was."""
    _, damage, message = REFUSED[name]
    c = checkpoint(KINDS[FP8], width=160)
    module = module_of(FP8, 160)
    before, state = bits_of(module), block_of(FP8, c)
    damage(state, "experts.")
    given = dict(state)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        module.load_state_dict(state)
    assert list(state) == list(given) and all(state[key] is value for key, value in given.items())
    if name in NAMED_BY_TORCH:
        message = r"(?s)Missing key.*experts\.fc1\.weight.*Unexpected key.*experts\."
    assert re.search(message.replace("model.*", ""), str(raised.value)), raised.value
    after = bits_of(module)
    assert all(torch.equal(after[key], before[key]) for key in after if key.startswith("experts."))


@pytest.mark.parametrize("layout", ["interleaved", "interleaved32"])
def test_blocks_of_a_gate_cannot_be_interleaved(layout: str) -> None:
    module = module_of(FP8, glu_layout=layout)
    message = f"experts are of blocks of the gate's .* glu_layout '{layout}' mixes; make the module with .*'concat'"
    with pytest.raises(ValueError, match=message):
        module.load_state_dict(block_of(FP8, checkpoint(KINDS[FP8])))


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("kind", [FP8, MXFP4, NVFP4])
def test_experts_in_16_bits_one_by_one_are_quantised_as_they_load(kind: str, layout: str) -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    shapes = ((EXPERTS, 96, 160), (EXPERTS, 96, 160), (EXPERTS, 160, 96))
    gate, up, down = (torch.randn(shape).bfloat16() * factor for shape, factor in zip(shapes, (1, 50, 3), strict=True))
    state = {
        f"experts.{expert}.{name}.weight": w[expert]
        for expert in range(EXPERTS) for name, w in zip(names, (gate, up, down), strict=True)
    }  # fmt: skip
    module, packed = (module_of(kind, glu_layout=layout) for _ in range(2))
    router = {"gate.weight": torch.randn(EXPERTS, 160)}
    module.load_state_dict(state | router)
    packed.load_state_dict(router | {"experts.gate_up_proj": torch.cat((gate, up), dim=1), "experts.down_proj": down})
    assert_same_bits(module, bits_of(packed))
    made = module.experts.fc2.experts("weight").dequantize()
    assert float((made - down.float()).norm()) < (0.05 if kind == FP8 else 0.2) * float(down.float().norm())
    if (kind, layout) == (FP8, "concat"):
        wanted = glulam.quantize_fp8_block(torch.cat((gate, up), dim=1), in_halves=True)
        assert torch.equal(module.experts.fc1.experts("weight").dequantize(), wanted.dequantize())


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_block_weight_only"])
@pytest.mark.parametrize("width", [96, 128])
def test_state_of_a_module_in_fp8_blocks(recipe: str, width: int) -> None:
    """Bytes of E4M3 elements and float32 scales, which no cast of the module changes; they pickle."""
    options = {"recipe": recipe, "bias": True, "dtype": torch.bfloat16}
    one, other = (glulam.nn.GroupedMLP(EXPERTS, 160, width, **options).requires_grad_(False) for _ in range(2))
    state = one.state_dict()
    grid = (EXPERTS, 2, 1, 2) if width == 96 else (EXPERTS, 2, 2)
    assert state["fc1.weight"].dtype == torch.uint8 and state["fc1.weight"].shape == (EXPERTS, 2 * width, 160)
    assert state["fc1.weight_scale"].dtype == torch.float32 and state["fc1.weight_scale"].shape == grid
    for layer in (one.fc1, one.fc2):
        values = layer.experts("weight").dequantize()
        assert bool(values.isfinite().all()) and 0.5 < float(values.abs().max()) * layer.in_features**0.5 <= 1 + 1e-6
    x = matrix(9, 160, torch.bfloat16, "cpu", 1)
    wanted = one(x, splits=[4, 0, 5])
    assert bool(wanted.isfinite().all()) and wanted.abs().max() > 1e-4
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert torch.equal(other(x, splits=[4, 0, 5]), wanted)
    other.half().to(torch.bfloat16)
    assert other.fc1.weight_scale.dtype == torch.float32 and other.fc1.weight.dtype == torch.uint8
    other.load_state_dict(state | {name: state[name].view(E4M3) for name in ("fc1.weight", "fc2.weight")})
    assert torch.equal(other(x, splits=[4, 0, 5]), wanted)
    with torch.device("meta"):
        made = glulam.nn.GroupedMLP(EXPERTS, 160, width, **options)
    made.load_state_dict(state, assign=True)
    assert torch.equal(made.requires_grad_(False)(x, splits=[4, 0, 5]), wanted)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp4_weight_only", "nvfp4_weight_only"])
@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("fc1.weight_scale", None, r"fc1\.weight_scale is missing, but fc1\.weight is there; give all parts"),
        ("fc2.weight", None, r"fc2\.weight is missing, but fc2\.weight_scale is there"),
        ("fc1.weight_scale", lambda t: t[:, :1], r"fc1\.weight_scale has shape \[3, 1, .*so it is truncated"),
        ("fc2.weight", lambda t: t[:2], r"fc2\.weight has shape \[2, 160, .* a weight \[3, 160, 96\] has \[3, 160, "),
        ("fc2.weight_scale", lambda t: t.double(), r"fc2\.weight_scale is torch.float64; it must be torch"),
    ],
)  # fmt: skip
def test_a_part_that_does_not_fit_leaves_the_whole_weight(
    part: str, change: Any, message: str, recipe: str, strict: bool
) -> None:
    module, other = (glulam.nn.GroupedMLP(EXPERTS, 160, 96, recipe=recipe) for _ in range(2))
    before, state = bits_of(module), dict(other.state_dict())
    value = state.pop(part)
    if change is not None:
        state[part] = change(value)
    given = dict(state)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, strict=strict)
    assert list(state) == list(given) and all(state[key] is value for key, value in given.items())
    after, layer = bits_of(module), part.split(".")[0]
    assert all(torch.equal(after[key], before[key]) for key in after if key.startswith(layer))
