"""Bad arguments: refused before anything runs, by messages that name the argument, its value and the remedy.

Each case runs twice: on CPU tensors, and on CPU tensors that are taken for GPU tensors, to which the kernels' own rules
(dtypes, widths, strides, alignment) apply too.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu

import glulam
from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import BundleError
from glulam.calls import checks, group_checks
from glulam.calls.checks import MAX_ROWS
from glulam.choose import kernels
from glulam.host import device, groups

pytest_plugins = ["support.fixtures"]

T, H, I, E = 24, 32, 64, 4  # noqa: E741
BF16 = torch.bfloat16


def good() -> dict[str, Any]:
    """Return arguments of a valid grouped_mlp call, with every optional one."""
    torch.manual_seed(0)
    return {
        "x": torch.randn(T, H).to(BF16),
        "w1": torch.randn(E, 2 * I, H).to(BF16),
        "w2": torch.randn(E, H, I).to(BF16),
        "offs": torch.tensor([5, 5, 20, 22], dtype=torch.int32),
        "row_scale": torch.rand(T),
        "b1": torch.randn(E, 2 * I).to(BF16),
        "b2": torch.randn(E, H).to(BF16),
        "out": torch.full((T, H), 7.0, dtype=BF16),
    }


def empty(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


def misaligned(*shape: int) -> torch.Tensor:
    """Return a tensor whose address is 2 bytes past a multiple of 16."""
    flat = empty(math.prod(shape) + 1)
    assert flat.data_ptr() % 16 == 0
    return flat[1:].view(shape)


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad call: changes to valid arguments, the error's type, and words of its message."""

    changes: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


def bad(error: type[Exception], *words: str, **changes: Any) -> Any:
    return pytest.param(Bad(changes, error, words), id=words[0])


def shared_out() -> dict[str, Any]:
    x = good()["x"]
    return {"x": x, "out": x}


def overlapping_out() -> dict[str, Any]:
    flat = empty(T * H + 64)
    return {"x": flat[: T * H].view(T, H), "out": flat[64:].view(T, H)}


COMMON = [
    bad(TypeError, "x is a list", "tensor [T, K]", x=[1.0]),
    bad(TypeError, "x is torch.int8", "cast", x=empty(T, H, dtype=torch.int8)),
    bad(ValueError, "x has shape [1, 24, 32]", "flatten", x=empty(1, T, H)),
    bad(ValueError, "x has shape [32]", "[T, K]", x=empty(H)),
    bad(ValueError, "x has a dimension of 0", x=empty(T, 0)),
    bad(ValueError, "x has stride 24 along its rows", ".contiguous()", x=empty(H, T).T),
    bad(ValueError, "x has rows", "overlap", x=empty(1, H).expand(T, H)),
    bad(ValueError, "w1 has shape [4, 128, 32]", "[4, 128, 16]", "16 columns", x=empty(T, 16)),
    bad(TypeError, "w1 is a NoneType", "list of E tensors", w1=None),
    bad(ValueError, "w1 has shape [128, 32]", "[E, 2I, H]", w1=empty(2 * I, H)),
    bad(TypeError, "w1 is torch.float16", "x is torch.bfloat16", w1=empty(E, 2 * I, H, dtype=torch.float16)),
    bad(ValueError, "w1 is a transposed view", "without .mT", "transpose_w=True", w1=empty(E, H, 2 * I).mT),
    bad(ValueError, "w1 is on meta", "x is on cpu", "move", w1=empty(E, 2 * I, H, device="meta")),
    bad(ValueError, "w1 has 0 experts (E = 0)", w1=empty(0, 2 * I, H)),
    bad(ValueError, "w1 is an empty list (E = 0)", w1=[]),
    bad(ValueError, "w1 has 127 rows", "2I", w1=empty(E, 2 * I - 1, H)),
    bad(ValueError, "w1[3] has shape [128, 16]", "w1[0] has [128, 32]", w1=[empty(2 * I, H)] * 3 + [empty(2 * I, 16)]),
    bad(ValueError, "w1[0] has shape [1, 128, 32]", "[2I, H]", w1=[empty(1, 2 * I, H)] * E),
    bad(TypeError, "w1[3] is torch.float16", w1=[empty(2 * I, H)] * 3 + [empty(2 * I, H, dtype=torch.float16)]),
    bad(ValueError, "w1[0] is a transposed view", w1=[empty(H, 2 * I).T] * E),
    bad(TypeError, "w1[0] is a int", "tensor [2I, H]", w1=[1, 2, 3, 4]),
    bad(ValueError, "w2 has shape [3, 32, 64]", "[4, 32, 64]", "E = 4", w2=empty(3, H, I)),
    bad(ValueError, "w2 has shape [4, 32, 32]", "I = 64", w2=empty(E, H, 32)),
    bad(ValueError, "both offs and splits", splits=[1, 2, 3, 4]),
    bad(ValueError, "neither offs nor splits", "cumulative ends", offs=None),
    bad(TypeError, "offs is torch.int64", "torch.int32", offs=torch.zeros(E, dtype=torch.int64)),
    bad(TypeError, "offs is a list", "tensor [E]", offs=[1, 2, 3, 4]),
    bad(ValueError, "offs has shape [3]", "[4]", offs=torch.zeros(3, dtype=torch.int32)),
    bad(ValueError, "offs has shape [4, 1]", offs=torch.zeros(E, 1, dtype=torch.int32)),
    bad(ValueError, "offs is on meta", "move it to cpu", offs=torch.zeros(E, dtype=torch.int32, device="meta")),
    bad(ValueError, "offs is not contiguous", offs=torch.zeros(2 * E, dtype=torch.int32)[::2]),
    bad(TypeError, "splits is torch.float32", "torch.int64", offs=None, splits=torch.zeros(E)),
    bad(ValueError, "splits has shape [5]", "[4]", offs=None, splits=[1] * 5),
    bad(TypeError, "splits is a int", "or a list", offs=None, splits=7),
    bad(TypeError, "row_scale is torch.bfloat16", ".float()", row_scale=empty(T)),
    bad(ValueError, "row_scale has shape [24, 1]", "[24]", row_scale=torch.ones(T, 1)),
    bad(ValueError, "row_scale has shape [23]", row_scale=torch.ones(T - 1)),
    bad(ValueError, "row_scale is not contiguous", row_scale=torch.ones(2 * T)[::2]),
    bad(TypeError, "row_scale is a float", row_scale=0.5),
    bad(ValueError, "b1 has shape [4, 64]", "[4, 128]", b1=empty(E, I)),
    bad(TypeError, "b1 is torch.float32", b1=torch.zeros(E, 2 * I)),
    bad(ValueError, "b2 has shape [32]", "[E, N]", b2=empty(H)),
    bad(ValueError, "b2 has shape [3, 32]", "[4, 32]", b2=[empty(H)] * 3),
    bad(ValueError, "b2 is not contiguous", b2=empty(H, E).T),
    bad(ValueError, "activation is 'swish'", "clamped_swiglu", activation="swish"),
    bad(ValueError, "activation is SiLU()", "swiglu", activation=torch.nn.SiLU()),
    bad(ValueError, "activation is ['silu']", activation=["silu"]),
    bad(ValueError, "glu_layout is 'split'", "interleaved32", glu_layout="split"),
    bad(ValueError, "glu_layout", "no gate", activation="silu", glu_layout="interleaved"),
    bad(ValueError, "I = 48", "multiple of 32", w1=empty(E, 96, H), glu_layout="interleaved32"),
    bad(ValueError, "recipe is 'fp8'", "bf16", recipe="fp8"),
    bad(TypeError, "limit is a Tensor", "float", limit=torch.tensor(7.0)),
    bad(ValueError, "limit is -1.0", limit=-1.0),
    bad(ValueError, "alpha is NaN", alpha=math.nan),
    bad(TypeError, "offset is a str", offset="1"),
    bad(ValueError, "out has shape [24, 16]", "[24, 32]", out=empty(T, 16)),
    bad(ValueError, "out has shape [23, 32]", "[24, 32]", out=empty(T - 1, H)),
    bad(TypeError, "out is torch.float32", out=torch.zeros(T, H)),
    bad(ValueError, "out is on meta", out=empty(T, H, device="meta")),
    bad(ValueError, "out has stride 24 along its rows", out=empty(H, T).T),
    bad(ValueError, "out has rows", "overlap", out=empty(1, H).expand(T, H)),
    bad(ValueError, "out overlaps x", **shared_out()),
    bad(ValueError, "out overlaps x", "buffer of its own", **overlapping_out()),
]

# What only kernels ask for.
KERNEL = [
    bad(TypeError, "x is torch.float32", "torch.bfloat16, torch.float16", x=torch.zeros(T, H)),
    bad(ValueError, "x has a dimension of 36", "multiple of 8", "pad", x=empty(T, 36)),
    bad(ValueError, "w1 (I) has a dimension of 60", w1=empty(E, 2 * 60, H)),
    bad(ValueError, "w2 has a dimension of 36", w2=empty(E, 36, I)),
    bad(ValueError, "x has rows 36 elements apart", "multiple of 8", x=empty(T, H + 4)[:, :H]),
    bad(ValueError, "out has rows 36 elements apart", out=empty(T, H + 4)[:, :H]),
    bad(ValueError, "x starts 2 bytes after a multiple of 16", "clone()", x=misaligned(T, H)),
    bad(ValueError, "w1 starts 2 bytes after", w1=misaligned(E, 2 * I, H)),
    bad(ValueError, "w2[3] starts 2 bytes", w2=[*(empty(H, I) for _ in range(3)), misaligned(H, I)]),
    bad(ValueError, "out starts 2 bytes after", out=misaligned(T, H)),
]

# Values of group sizes that the host can read: from the CPU always, from a GPU in lists only.
HOST_SIZES = [
    bad(ValueError, "splits[1] is -2", offs=None, splits=[1, -2, 3, 4]),
    bad(ValueError, "splits sum to 36", "24 rows", offs=None, splits=[9, 9, 9, 9]),
    bad(TypeError, "splits holds 2.5", offs=None, splits=[1, 2.5, 3, 4]),
]
CPU_SIZES = [
    bad(ValueError, "offs end at 25", "24 rows", offs=torch.tensor([1, 2, 3, 25], dtype=torch.int32)),
    bad(ValueError, "offs[1] is 4, after 5", "splits", offs=torch.tensor([5, 4, 6, 7], dtype=torch.int32)),
    bad(ValueError, "splits sum to 25", offs=None, splits=torch.tensor([25, 0, 0, 0])),
]


def refuse(case: Bad) -> None:
    arguments = {**good(), **case.changes}
    out = arguments["out"]
    before = None if out.is_meta else out.clone()
    with torch.no_grad(), pytest.raises(case.error) as caught:
        glulam.grouped_mlp(**arguments)
    message = str(caught.value)
    assert message.startswith("grouped_mlp: ")
    for word in case.words:
        assert word in message, message
    assert before is None or torch.equal(before, out), "something was computed"


@pytest.mark.parametrize("case", COMMON + HOST_SIZES + CPU_SIZES)
def test_refused_on_the_cpu(case: Bad) -> None:
    refuse(case)


@pytest.mark.parametrize("case", COMMON + KERNEL + HOST_SIZES)
def test_refused_before_a_launch(case: Bad, fake_gpu: FakeGpu) -> None:
    refuse(case)
    assert not fake_gpu.launches


# get_device() is -1 for meta and for CPU tensors alike, though not for a GPU's: only the stand-in mistakes them.
BARE_ON_META = ("offs is on meta",)


@pytest.mark.parametrize("case", [b for b in COMMON + KERNEL if b.id not in BARE_ON_META])
def test_refused_after_good_calls(case: Bad, fake_gpu: FakeGpu) -> None:
    """Plans that were made by then must not let through what they did not see."""
    arguments = good()
    for _ in range(2):
        glulam.grouped_mlp(**arguments)
        glulam.grouped_mlp(**{**arguments, "out": None})
    fake_gpu.launches.clear()
    refuse(case)
    assert not fake_gpu.launches


def test_good_arguments_are_good(fake_gpu: FakeGpu) -> None:
    arguments = good()
    assert glulam.grouped_mlp(**arguments) is arguments["out"]
    assert len(fake_gpu.launches) == 1


@pytest.mark.parametrize("name", ["x", "w1", "w2", "row_scale", "b1", "b2"])
@pytest.mark.parametrize("listed", [False, True])
def test_gradients_into_a_given_buffer_are_refused(name: str, listed: bool) -> None:
    arguments = good()
    value = arguments[name].requires_grad_()
    if listed and name not in ("x", "row_scale"):
        arguments[name] = [expert.detach() for expert in value[:-1]] + [value[-1].detach().requires_grad_()]
    with pytest.raises(glulam.GradientNotSupported, match=r"out is given.*torch\.no_grad\(\)") as caught:
        glulam.grouped_mlp(**arguments)
    assert isinstance(caught.value, NotImplementedError)
    with torch.no_grad():
        glulam.grouped_mlp(**arguments)
    with torch.inference_mode():
        glulam.grouped_mlp(**arguments)


@pytest.mark.parametrize("op", ["grouped_mm", "grouped_glu"])
def test_other_operators_name_themselves(op: str) -> None:
    arguments = good()
    call = getattr(glulam, op)
    with torch.no_grad(), pytest.raises(ValueError, match=f"^{op}: "):
        call(arguments["x"], arguments["w1"][:, :, :16].contiguous(), offs=arguments["offs"])


def test_grouped_mm_hints_at_transposition() -> None:
    x, w = empty(T, 64), empty(E, 64, 32)
    with pytest.raises(ValueError, match=r"w has shape \[4, 64, 32\].*transpose_w=True"):
        glulam.grouped_mm(x, w, splits=[0] * E)
    with pytest.raises(TypeError, match="transpose_w is 'no'"):
        glulam.grouped_mm(x, w, splits=[0] * E, transpose_w="no")  # type: ignore[arg-type]


def test_too_many_rows(fake_gpu: FakeGpu) -> None:
    x = empty(1, 8).expand(MAX_ROWS, 8)
    with pytest.raises(ValueError, match=r"x has 67108864 rows; at most 2\*\*26 - 1"):
        glulam.grouped_mm(x, empty(E, 8, 8), splits=[0] * E)


def test_too_many_rows_by_index(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(group_checks, "MAX_ROWS", 64)
    with pytest.raises(ValueError, match="rows has 64 indices; at most"):
        glulam.grouped_mm(empty(3, 8), empty(E, 8, 8), splits=[0] * E, rows=rows)


def test_rows_too_far_apart(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels count the distance between rows in 32 bits; also where a kept plan serves another number of rows."""
    monkeypatch.setattr(checks, "MAX_SPAN", 1024)
    x, w = empty(40, 64), empty(E, 32, 64)
    ends, rows = torch.tensor([2] * E, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    glulam.grouped_mm(x[:8], w, offs=ends)
    glulam.grouped_mm(x[:8], w, offs=ends, rows=rows)
    for number in (9, 40):
        for call in ({}, {"rows": rows}):
            with pytest.raises(ValueError, match="x lies in .* GiB of memory; at most"):
                glulam.grouped_mm(x[:number], w, offs=ends, **call)


def test_columns_of_one_buffer_do_not_overlap() -> None:
    """x and out side by side in one buffer interleave in memory, yet share nothing."""
    buffer = torch.randn(T, 2 * H).to(BF16)
    arguments = {**good(), "x": buffer[:, :H], "out": buffer[:, H:]}
    expected = glulam.grouped_mlp(**{**arguments, "out": None})
    glulam.grouped_mlp(**arguments)
    assert torch.equal(arguments["out"][:22], expected[:22])


def test_unsupported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": "NVIDIA A100", "major": 8, "minor": 0, "multi_processor_count": 108})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device.gpu.cache_clear()
    monkeypatch.setattr(device, "KERNEL_DEVICE", "cpu")
    with pytest.raises(glulam.UnsupportedDevice, match=r"NVIDIA A100 of compute capability 8\.0.*9\.0.*CPU"):
        glulam.grouped_mlp(**good())
    assert issubclass(glulam.UnsupportedDevice, RuntimeError)


def test_no_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLULAM_BUNDLE", str(tmp_path))
    with pytest.raises(BundleError, match="no bundle.*glulam build"):
        kernels.find(GroupedMmSpec())


def test_checking_mode(monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu) -> None:
    """Group sizes on the device that are out of range: clamped as a rule, reported on request."""
    arguments = {**good(), "offs": torch.tensor([5, 5, 20, 30], dtype=torch.int32)}
    glulam.grouped_mlp(**arguments)
    kernels.forget_plans()
    monkeypatch.setenv("GLULAM_CHECK", "1")
    glulam.grouped_mlp(**good())
    for _ in range(2):
        with pytest.raises(ValueError, match="offs end at 30, but x has 24 rows"):
            glulam.grouped_mlp(**arguments)
    assert len(fake_gpu.launches) == 2
    fake_gpu.capturing = True
    with pytest.warns(UserWarning, match="under graph capture"):
        glulam.grouped_mlp(**arguments)


def test_host_splits_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    with pytest.raises(glulam.CaptureError, match="splits is a list or a CPU tensor.*CUDA tensor"):
        groups.on_device("grouped_mm", [1, 2], 3, torch.device("cuda"))


def state_errors() -> list[tuple[Any, Any, str]]:
    """Return (state, module, words of the error) for bad calls of both state dict conversions."""
    module = glulam.nn.GroupedLinear(E, H, I)
    states = [(state, module, "state is a ") for state in (None, 3, "x", [("weight", 1)], torch.ones(3))]
    return states + [({}, wrong, "module is a ") for wrong in (None, 3, "x", {})]


@pytest.mark.parametrize("state, module, named", state_errors(), ids=lambda value: f"{value!s:.20}")
@pytest.mark.parametrize("convert", [glulam.nn.convert_state_dict, glulam.nn.convert_optimizer_state])
def test_what_is_no_state_or_no_module_is_named(convert: Any, state: Any, module: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"^{convert.__name__}: {named}"):
        convert(state, module)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"state": None}, r"state\['state'\] is a NoneType"),
        ({"param_groups": None}, r"state\['param_groups'\] is a NoneType"),
        ({"param_groups": "x"}, r"state\['param_groups'\] is a str"),
        ({"param_groups": [{"params": []}, {}]}, r"state\['param_groups'\]\[1\]"),
        ({"param_groups": [3]}, r"state\['param_groups'\]\[0\]"),
        ({"param_groups": [{"params": 3}]}, r"state\['param_groups'\]\[0\]"),
        ({"param_groups": [{"params": [["weight"]]}]}, r"state\['param_groups'\]\[0\]"),
    ],
)
def test_parts_of_an_optimizer_state_are_named(changes: dict[str, Any], named: str) -> None:
    state = {"state": {}, "param_groups": [{"params": ["weight"]}], **changes}
    with pytest.raises(TypeError, match=named):
        glulam.nn.convert_optimizer_state(state, glulam.nn.GroupedLinear(E, H, I))


@pytest.mark.parametrize("key", [7, None, ("fc1", "weight"), b"weight"])
def test_keys_that_are_no_strings_are_left_as_they_are(key: Any) -> None:
    for module in (glulam.nn.GroupedLinear(E, H, I), glulam.nn.MoE(H, I, E, 2)):
        for convert in (glulam.nn.convert_state_dict, glulam.nn.convert_optimizer_state):
            assert convert({key: 1}, module) == {key: 1}
        whole = {**module.state_dict(), key: 1}
        assert list(glulam.nn.convert_state_dict(whole, module)) == list(whole)


@pytest.mark.parametrize("wrong", [None, "x", 1.5, [3], object()], ids=lambda value: type(value).__name__)
def test_arguments_of_methods_are_named(wrong: Any) -> None:
    x = glulam.quantize_mxfp8(torch.randn(256, 64).to(BF16), axis="col")
    with pytest.raises(TypeError, match=r"^group: index is .*give an integer"):
        x.group(wrong, [128, 256])
    for offs in (wrong, [wrong], 3, torch.tensor([1.5])):
        if offs != [3]:
            with pytest.raises(TypeError, match=r"^group: offs is .*give a tensor"):
                x.group(0, offs)
    for given, named in (((wrong, x.metadata()), "tensors"), ((x.tensors(), wrong), "metadata")):
        with pytest.raises(TypeError, match=rf"^MXFP8Tensor.from_tensors: {named} is a "):
            glulam.MXFP8Tensor.from_tensors(*given)
    for part in ("data", "scale"):
        with pytest.raises(TypeError, match=rf"^MXFP8Tensor: {part} is "):
            glulam.MXFP8Tensor.from_tensors({**x.tensors(), part: wrong}, x.metadata())
    layer = glulam.nn.MoE(H, I, E, 2, score="sigmoid", choice_bias=True)
    if not isinstance(wrong, float):
        with pytest.raises(TypeError, match="^update_choice_bias: rate is a "):
            layer.update_choice_bias(wrong, torch.ones(E))
    if wrong is not None:
        with pytest.raises(TypeError, match="^update_choice_bias: counts is a "):
            layer.update_choice_bias(0.1, wrong)
    routing = dataclasses.replace(glulam.route(torch.randn(T, E), 2), offs=wrong)
    with pytest.raises(TypeError, match=r"routing\.offs is a "):
        _ = routing.counts


def test_counts_of_another_shape_are_named() -> None:
    layer = glulam.nn.MoE(H, I, E, 2, score="sigmoid", choice_bias=True)
    with pytest.raises(ValueError, match=r"counts has shape \[3\]; it must be \[4\]"):
        layer.update_choice_bias(0.1, torch.ones(3))


def test_an_eps_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="^HyperConnection: sinkhorn_eps is a NoneType"):
        glulam.nn.HyperConnection(4, H, sinkhorn_eps=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["out", "grad_input"])
def test_buffers_that_cannot_be_hashed_are_named(name: str) -> None:
    linear = glulam.nn.GroupedLinear(E, H, I)
    x = torch.randn(T, H, requires_grad=name == "grad_input")
    for wrong in ({}, [torch.empty(T, I)]):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            linear(x, offs=good()["offs"], **{name: wrong})
