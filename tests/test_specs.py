"""Specs: names, parsing names back, and invalid specs."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cute_kernels.chains import stages_of
from cute_kernels.formats import next_operands
from cute_kernels.layer import kernels as layer
from cute_kernels.mhc import kernels as mhc
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import (
    DGLU8,
    LARGE,
    LARGE8,
    LARGE_W8,
    MEDIUM_W8,
    SMALL,
    SMALL8,
    TILES,
    TILES_W8,
    TINY8_W4,
    TINY_W8,
    WGRAD,
    glu_form,
    shipped_specs,
)
from cute_kernels.specs import (
    ACTIVATION_FORMS,
    ACTIVATIONS,
    DECODED,
    GATED,
    GLU_LAYOUTS,
    KINDS,
    LAYOUT_FORMS,
    LAYOUTS,
    OPERANDS,
    UNGATED,
    BackwardCleanupSpec,
    DgluSpec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    Spec,
    WgradSpec,
    from_dict,
    to_dict,
)
from cute_kernels.stages import draws_tickets, tracer_of
from cute_kernels.tiles import SpecError, TileConfig


def test_shipped_names_are_unique_symbols() -> None:
    names = [spec.name for spec in shipped_specs()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_bundle_ships_every_form_of_every_operator_on_every_tile() -> None:
    specs = set(shipped_specs())
    forms = activation_forms()
    assert {activation for activation, _ in forms} == set(ACTIVATIONS)
    assert {layout for activation, layout in forms if activation in GATED} == set(GLU_LAYOUTS)
    for tile in TILES:
        for dtype in ("bfloat16", "float16"):
            mm = GroupedMmSpec(dtype, False, tile)
            transposed = dataclasses.replace(mm, transpose_w=True)
            assert {mm, transposed, dataclasses.replace(transposed, in_halves=True)} <= specs
            for (activation, layout), width, saves in itertools.product(forms, (96, 104), (False, True)):
                if layout == "interleaved32" and width % 32:
                    continue  # no such layer
                form = glu_form(activation, layout, width, "16bit", tile, saves)
                assert activation in ACTIVATION_FORMS[form[0]] and layout in LAYOUT_FORMS[form[1]]
                glu = GroupedGluSpec(dtype, form[0], form[1], saves, tile)
                assert {glu, GroupedMlpSpec(glu, mm)} <= specs
                form = glu_form(activation, layout, width, "16bit", tile, saves, transpose_w=True)
                assert activation in ACTIVATION_FORMS[form[0]] and layout == form[1]
                glu = GroupedGluSpec(dtype, form[0], form[1], saves, tile, transpose_w=True)
                mlp = GroupedMlpSpec(glu, transposed)
                assert glu in specs and (mlp in specs) is not saves  # whose training calls the two one by one


def test_bundle_ships_every_form_of_a_backward() -> None:
    specs = set(shipped_specs())
    for dtype, form in itertools.product(("bfloat16", "float16"), activation_forms()):
        dglu = GroupedDgluSpec(dtype, *form, LARGE)
        assert {dglu, dataclasses.replace(dglu, dgrad=LARGE), dataclasses.replace(dglu, transpose_w=True)} <= specs


def test_bundle_ships_every_form_of_an_mlp_that_decodes_its_weights() -> None:
    specs = set(shipped_specs())
    for tile in TILES_W8:
        for operands in DECODED:
            mm = GroupedMmSpec(tile=tile, operands=next_operands(operands))
            assert mm in specs
            for activation, layout in activation_forms():
                form = glu_form(activation, layout, 96, operands, tile, False)
                assert activation in ACTIVATION_FORMS[form[0]] and layout in LAYOUT_FORMS[form[1]]
                glu = GroupedGluSpec("bfloat16", form[0], form[1], False, tile, operands=operands)
                assert GroupedMlpSpec(glu, mm) in specs


def test_operands_say_what_is_decoded_scaled_and_read_next() -> None:
    assert DECODED == (
        "mxfp8_weight_only",
        "mxfp8_exact",
        "mxfp4_weight_only",
        "nvfp4_weight_only",
        "fp8_block_weight_only",
    )
    assert [name for name, operands in OPERANDS.items() if operands.has_scaled_rows] == [
        "mxfp8",
        "mxfp8_blocks",
        "mxfp4",
        "fp8_block",
    ]
    assert [name for name, operands in OPERANDS.items() if operands.decodes_to_fp8] == ["mxfp4"]
    assert [name for name, operands in OPERANDS.items() if operands.trains] == ["16bit", "mxfp8", "mxfp8_blocks"]
    follows = {name: next_operands(name) for name in OPERANDS}
    assert follows == {**{name: name for name in OPERANDS}, "mxfp8_exact": "mxfp8_weight_only"}, "16-bit rows"
    for name, operands in OPERANDS.items():
        assert operands.x.dtype("bfloat16") == operands.act.dtype("bfloat16"), "what FC1 makes, FC2 reads"
        assert bool(operands.prefix) == (name != "16bit")


GATED_AT_RUN_TIME = ("swiglu", "clamped_swiglu", "geglu", "reglu")


@pytest.mark.parametrize(("form", "served"), [("gated", GATED_AT_RUN_TIME), ("ungated", UNGATED)])
def test_one_kernel_serves_several_activations(form: str, served: tuple[str, ...]) -> None:
    spec = GroupedGluSpec(activation=form)
    assert ACTIVATION_FORMS[form] == served
    assert all(GroupedGluSpec(activation=name).gated == spec.gated for name in served)
    assert spec.name not in {GroupedGluSpec(activation=name).name for name in served}
    assert from_dict(to_dict(spec)) == spec


@pytest.mark.parametrize(
    ("tile", "operands", "save_preact"),
    [
        (LARGE8, "mxfp8", True),
        (SMALL8, "mxfp8", False),
        (MEDIUM_W8, "mxfp8_weight_only", False),
        (TINY_W8, "mxfp8_exact", False),
    ],
)
@pytest.mark.parametrize("layout", GLU_LAYOUTS)
def test_gated_activations_of_one_layout(layout: str, tile: TileConfig, operands: str, save_preact: bool) -> None:
    spec = GroupedGluSpec("bfloat16", "gated", layout, save_preact, tile, operands=operands)
    assert spec.gated and f"gated_{layout}_" in spec.name
    assert from_dict(to_dict(spec)) == spec


def test_activations_and_layouts_have_numbers_of_their_own() -> None:
    """Kernels hold them, so what is added later comes last."""
    assert tuple(KINDS) == (*GATED_AT_RUN_TIME, "srelu", "silu", "gelu", "none", "situ") == ACTIVATIONS
    assert list(KINDS.values()) == list(range(len(ACTIVATIONS)))
    assert sorted(LAYOUTS.values()) == list(range(len(GLU_LAYOUTS)))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"activation": "ungated", "glu_layout": "blocked"}, "has no gate"),
        ({"activation": "any"}, "activation='any' is not supported; choose one of: gated, ungated, swiglu"),
    ],
)
def test_forms_that_no_kernel_has(fields: dict[str, str], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        GroupedGluSpec(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"activation": "gated"}, {"glu_layout": "blocked"}])
def test_a_backward_is_compiled_for_one_activation_and_layout(fields: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="choose one of: (swiglu|concat)"):
        GroupedDgluSpec(**fields)  # type: ignore[arg-type]


def test_a_swapped_tile_counts_in_weight_rows() -> None:
    tile = TileConfig(m=16, n=256, k=128, schedule="swapped")
    assert (tile.warpgroups, tile.slabs, tile.mma_n, tile.name) == (2, 2, 16, "t16x256x128_c1x1_swap")
    single = dataclasses.replace(tile, schedule="swapped_single")
    assert (single.warpgroups, single.slabs, single.mma_n, single.name) == (4, 1, 16, "t16x256x128_c1x1_swap1")
    assert TileConfig(m=256, n=128, k=128, schedule="swapped_single").accumulators == 128


def test_round_trip_through_json() -> None:
    for spec in shipped_specs():
        assert from_dict(json.loads(json.dumps(to_dict(spec)))) == spec


def test_a_name_tells_every_field_apart() -> None:
    base = GroupedGluSpec()
    others = [
        GroupedGluSpec(dtype="float16"),
        GroupedGluSpec(activation="geglu"),
        GroupedGluSpec(glu_layout="interleaved"),
        GroupedGluSpec(save_preact=True),
        GroupedGluSpec(transpose_w=True),
        GroupedGluSpec(tile=TileConfig(cluster_m=2)),
        GroupedGluSpec(tile=TileConfig(m=64)),
        GroupedMmSpec(),
        GroupedMmSpec(transpose_w=True),
        GroupedMmSpec(transpose_w=True, in_halves=True),
        GroupedMlpSpec(),
        GroupedDgluSpec(),
        GroupedDgluSpec(tile=TileConfig(n=128)),
        GroupedDgluSpec(dgrad=TileConfig()),
        GroupedDgluSpec(transpose_w=True),
    ]
    assert len({spec.name for spec in [base, *others]}) == len(others) + 1


IN_TENSOR_MEMORY = TileConfig(m=128, n=128, k=64, schedule="tensor_memory")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TileConfig(m=96), "tile m=96 is not supported; choose one of: 64, 128"),
        (lambda: TileConfig(n=100), "tile n=100"),
        (lambda: TileConfig(k=48), "tile k=48"),
        (lambda: TileConfig(cluster_m=2, cluster_n=2), r"cluster \(m, n\)=\(2, 2\)"),
        (lambda: TileConfig(schedule="stream_k"), "schedule='stream_k'.*cooperative"),
        (lambda: GroupedMmSpec(dtype="float32"), "dtype='float32'.*bfloat16, float16"),
        (lambda: GroupedMmSpec(arch="sm_75"), "arch='sm_75'.*sm_90a"),
        (lambda: GroupedGluSpec(activation="tanh"), "activation='tanh'.*swiglu"),
        (lambda: GroupedGluSpec(glu_layout="rows"), "glu_layout='rows'.*interleaved32"),
        (lambda: GroupedGluSpec(activation="silu", glu_layout="interleaved"), "no gate; leave glu_layout"),
        (
            lambda: GroupedGluSpec(tile=TileConfig(n=128, k=128), operands="mxfp8"),
            "tile n=128: 256 weight rows make the FP8 activations that share a scale",
        ),
        (lambda: GroupedGluSpec(save_preact=True, tile=LARGE8, operands="fp8_block"), "save_preact is for training"),
        (lambda: GroupedDgluSpec(tile=DGLU8, operands="fp8_block"), "'fp8_block' is not.*one of: 16bit, mxfp8"),
        (lambda: GroupedMmSpec(tile=LARGE8, arch="sm_80", operands="fp8_block_weight_only"), "schedule"),
        (
            lambda: GroupedMmSpec(arch="sm_100a"),
            "schedule='cooperative' belongs to another architecture than sm_100a; choose one of: tensor_memory, warps",
        ),
        (lambda: GroupedMmSpec(tile=IN_TENSOR_MEMORY), "another architecture than sm_90a; choose one of: cooperative"),
        (
            lambda: GroupedMmSpec(tile=IN_TENSOR_MEMORY, arch="sm_100a", operands="mxfp8"),
            "operands='mxfp8' are multiplied on sm_90a alone, not on sm_100a; choose one of: 16bit, mxfp8_blocks",
        ),
        (
            lambda: GroupedMmSpec(tile=LARGE8, operands="mxfp8_blocks"),
            "operands='mxfp8_blocks' are multiplied on sm_100a, sm_103a alone, not on sm_90a",
        ),
        (
            lambda: GroupedWgradSpec(tile=LARGE8, operands="mxfp8_blocks"),
            "operands='mxfp8_blocks' are multiplied on sm_100a, sm_103a alone, not on sm_90a",
        ),
        (lambda: GroupedWgradSpec(operands="mxfp8"), "operands='mxfp8' is not.*one of: 16bit, mxfp8_blocks"),
        (lambda: WgradSpec(operands="16bit"), "operands='16bit' is not supported; choose one of: mxfp8_blocks"),
        (
            lambda: GroupedMmSpec(tile=IN_TENSOR_MEMORY, arch="sm_100a", adapted=True),
            "kernels of 16-bit weights have adapters; choose adapted=False",
        ),
        (lambda: TileConfig(m=64, n=128, schedule="tensor_memory"), "tile m=64 is not supported; choose one of: 128"),
        (lambda: TileConfig(cluster_m=2, schedule="tensor_memory"), r"cluster \(m, n\)=\(2, 1\)"),
        (lambda: GroupedMlpSpec(GroupedGluSpec(dtype="float16")), "must agree in dtype"),
        (lambda: GroupedMlpSpec(fc2=GroupedMmSpec(transpose_w=True)), "both transposed or neither"),
        (lambda: GroupedMlpSpec(fc1=GroupedGluSpec(transpose_w=True)), "both transposed or neither"),
        (
            lambda: GroupedGluSpec(tile=LARGE8, operands="mxfp8", transpose_w=True),
            "transpose_w needs 16-bit weights",
        ),
        (
            lambda: GroupedGluSpec("bfloat16", "gated", "blocked", transpose_w=True),
            "glu_layout of transposed weights='blocked'.*concat, interleaved, interleaved32",
        ),
        (
            lambda: GroupedGluSpec(tile=TileConfig(n=192, schedule="pingpong"), transpose_w=True),
            "tile n=192: either half.*choose tile n=128 or 256",
        ),
        (lambda: GroupedMmSpec(in_halves=True), "in_halves splits a contraction.*choose transpose_w=True"),
        (lambda: GroupedMmSpec(transpose_w=True, in_halves=True, adapted=True), "an adapted kernel reads one weight"),
        (
            lambda: GroupedMmSpec(tile=TileConfig(n=128, schedule="warps"), arch="sm_90", adapted=True),
            "only Hopper's own kernels of 16-bit weights have adapters",
        ),
        (lambda: GroupedGluSpec(adapted=True), "stores the preactivation; choose save_preact=True"),
        (lambda: GroupedDgluSpec(dgrad=TileConfig(), adapted=True), "no dgrad follows an adapted grouped_dglu"),
        (lambda: GroupedMlpSpec(quantized=True), "operands='mxfp8'"),
        (lambda: DgluSpec(dgrad=TileConfig()), "without dgrad"),
        (lambda: GroupedDgluSpec(dgrad=TileConfig(), transpose_w=True), "with transpose_w leave it out"),
        (
            lambda: GroupedDgluSpec(tile=DGLU8, operands="mxfp8", transpose_w=True),
            "transpose_w needs 16-bit weights",
        ),
        (lambda: BackwardCleanupSpec("float32"), "dtype='float32'"),
        (lambda: TileConfig(m=16), "tile m=16 is not supported; choose one of: 64, 128"),
        (lambda: TileConfig(m=48, n=256, k=128, schedule="swapped"), "tile m=48.*16, 32, 64, 96, 128, 256"),
        (lambda: TileConfig(m=256, k=128, schedule="swapped"), "256 accumulators.*more than 128; choose tile m=128"),
        (lambda: TileConfig(m=128, k=128, schedule="swapped_single"), "64 acc.*than 48; choose tile m=96.*smaller n"),
        (lambda: TileConfig(n=64, k=128, schedule="swapped"), "tile n=64.*128, 256"),
        (lambda: TileConfig(k=128, cluster_m=2, schedule="swapped"), r"cluster \(m, n\)=\(2, 1\)"),
        (
            lambda: GroupedMmSpec(tile=TileConfig(n=128, k=128, schedule="pingpong"), operands="mxfp8"),
            "schedule='pingpong' does not fit operands='mxfp8'.*choose schedule='cooperative'",
        ),
        (lambda: GroupedMmSpec(tile=LARGE_W8), "tile k=128 does not fit operands='16bit'"),
        (lambda: GroupedMmSpec(tile=TINY8_W4, operands="mxfp8"), "'swapped_whole' does not fit operands='mxfp8'"),
        (lambda: GroupedMmSpec(tile=TINY8_W4, operands="mxfp4_weight_only"), "'swapped_whole' does not.*'swapped'"),
        (lambda: GroupedMmSpec(tile=TINY_W8, operands="mxfp4"), "'swapped_single' does not fit operands='mxfp4'"),
        (lambda: GroupedMmSpec(tile=LARGE_W8, operands="mxfp8"), "'swapped_single' does not fit operands='mxfp8'"),
        (
            lambda: GroupedMmSpec(tile=TileConfig(k=128), operands="mxfp8_weight_only"),
            "'cooperative' does not fit operands='mxfp8_weight_only'; choose schedule='swapped'",
        ),
        (
            lambda: GroupedMmSpec("float16", False, LARGE_W8, operands="mxfp8_weight_only"),
            "dtype='float16'.*whose range bfloat16 alone has.*choose dtype='bfloat16'",
        ),
        (
            lambda: GroupedGluSpec(save_preact=True, tile=LARGE_W8, operands="mxfp8_exact"),
            "save_preact is for training",
        ),
        (lambda: GroupedDgluSpec(tile=LARGE_W8, dgrad=LARGE_W8, operands="mxfp8_exact"), "operands='mxfp8_exact'"),
        (lambda: GroupedWgradSpec(tile=LARGE_W8), "tile k=128 does not fit"),
        (
            lambda: GroupedWgradSpec(tile=TileConfig(16, 128, schedule="warps"), arch="sm_90"),
            "tile m=16 is less than the 64 columns of dy",
        ),
        (lambda: from_dict({"op": "conv"}), "op='conv'.*grouped_mm"),
        (lambda: from_dict({"op": "grouped_mm", "rows": 3}), "no field 'rows'"),
    ],
)
def test_impossible_specs_are_refused(build, message) -> None:
    with pytest.raises(SpecError, match=message):
        build()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GroupedMmSpec(tile=LARGE), True),
        (GroupedMmSpec(tile=SMALL), False),
        (GroupedMlpSpec(GroupedGluSpec(tile=SMALL), GroupedMmSpec(tile=LARGE)), True),
        (GroupedMlpSpec(GroupedGluSpec(tile=SMALL), GroupedMmSpec(tile=SMALL)), False),
        (DgluSpec(tile=LARGE), False),
        (GroupedDgluSpec(tile=LARGE), False),
        (GroupedDgluSpec(tile=LARGE, dgrad=LARGE), True),
        (GroupedDgluSpec(tile=DGLU8, dgrad=LARGE8, operands="mxfp8"), True),
        (GroupedWgradSpec(tile=WGRAD), False),
        (GroupedMmSpec(tile=LARGE_W8, operands="mxfp8_weight_only"), False),
        (BackwardCleanupSpec(), False),
        (MhcSpec(), False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_who_draws_tickets(spec: Spec, expected: bool) -> None:
    """Adaptive clusters do, except a backward's activation's, whose epilogue has loads of its own."""
    assert draws_tickets(spec) is expected


def test_naming_kernels_imports_no_compiler() -> None:
    code = "import sys, cute_kernels.sm90.configs as c; c.shipped_specs(); assert 'cutlass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hyper_connections_ship_for_every_count_and_dtype_of_streams() -> None:
    specs = [spec for spec in shipped_specs() if isinstance(spec, MhcSpec)]
    forms = {(spec.kernel, spec.dtype, spec.n) for spec in specs}
    assert len(specs) == len(forms) == (len(mhc.KERNELS) - 4) * 9 + 2 * 3 + 2 * 2
    assert ("post_mix_backward", "float32", 8) in forms and ("sinkhorn", "bfloat16", 4) not in forms


@pytest.mark.parametrize("family", [layer, mhc], ids=["layer", "mhc"])
def test_a_row_of_a_kernel_is_whole(family: Any) -> None:
    """A kernel has arguments and a module that exists; a chain has steps instead; and what ships can be named."""
    for name, kernel in family.KERNELS.items():
        assert (kernel.arguments is None) == (not kernel.module), name
        assert set(kernel.ships) <= set(kernel.dtypes), name
        dtype = kernel.dtypes[0]
        spec = MhcSpec(name, dtype) if family is mhc else LayerSpec(name, dtype, 128 if kernel.is_sized else 0)
        if kernel.module:
            assert importlib.util.find_spec(f"cute_kernels.{kernel.module}") is not None, name
            assert list(stages_of(spec)) == [spec] and tracer_of(spec) == f"cute_kernels.{kernel.module}:trace", name
        else:
            assert len(list(stages_of(spec))) > 1, name
            with pytest.raises(SpecError, match="chain"):
                tracer_of(spec)


def test_a_row_of_the_command_line_for_every_shipped_function() -> None:
    from ffi_bridge.manifest import Function
    from glulam.command.bundle import _cells

    functions = {spec.name: Function(to_dict(spec), ()) for spec in shipped_specs()}
    rows = [list(_cells(functions, name).values()) for name in functions]
    assert len({len(row) for row in rows}) == 1
    assert ["mhc", "float16", "-", "-", "-", "aggregate, n=4"] in [row[:6] for row in rows]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MhcSpec("project", "bfloat16", 3), "n=3 is not supported; choose one of: 2, 4, 8"),
        (lambda: MhcSpec("mix"), "kernel='mix'"),
        (lambda: MhcSpec("boundary", "bfloat16", 8), "n=8 is not supported; choose one of: 4"),
        (lambda: MhcSpec("boundary", "float32"), "dtype='float32'"),
        (lambda: MhcSpec("sinkhorn", "bfloat16"), "dtype='bfloat16'.*float32"),
        (lambda: MhcSpec(arch="sm_75"), "arch='sm_75'"),
    ],
)
def test_impossible_hyper_connection_specs(build: Callable[[], MhcSpec], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build()
