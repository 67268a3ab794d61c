"""Dispatch: the kernel that a call gets, its explanation, and kernels added by `compile`."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_gpu import SM_COUNT, FakeGpu, bound, exported

import ffi_bridge
import glulam
from cute_kernels.chains import signature_of
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import LARGE, SMALL, WGRAD, WGRAD_WIDE, shipped_specs
from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec, LayerSpec, to_dict
from cute_kernels.tiles import SpecError, TileConfig
from ffi_bridge import BundleMissing, jit
from glulam.choose import choose, kernels, known, loadable
from glulam.choose.problem import Problem
from glulam.choose.shipped import family_of
from glulam.host import device as gpus
from glulam.host import tickets

pytest_plugins = ["support.fixtures"]

ARCH = "sm_90a"
TILE = TileConfig(128, 128, 64)


def problem(**changes: Any) -> Problem:
    fields = {
        "op": "grouped_mlp", "dtype": "bfloat16", "rows": 4096, "experts": 8, "in_features": 64, "intermediate": 64,
        "out_features": 64, "activation": "swiglu",
    }  # fmt: skip
    return Problem(**{**fields, **changes})


class FakeBundle:
    """A bundle of the shipped specs whose functions record their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.specs = {spec.name: spec for spec in shipped_specs()}
        functions = {name: manifest_entry(spec) for name, spec in self.specs.items()}
        self.manifest = type("Manifest", (), {"functions": functions})

    def has(self, name: str) -> bool:
        return name in self.specs

    def function(self, name: str) -> Callable[..., None]:
        if not self.has(name):
            raise BundleMissing(f"no function {name!r}; run `glulam build`")
        return lambda *arguments: self.calls.append((name, arguments))


def manifest_entry(spec: Any) -> Any:
    return type("Entry", (), {"spec": json.loads(json.dumps(to_dict(spec)))})


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> FakeBundle:
    fake = FakeBundle()
    monkeypatch.setattr(ffi_bridge, "load", lambda arch: fake)
    return fake


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundle: FakeBundle) -> Iterator[list[Any]]:
    """List that gets specs sent to the compiler; undoes registrations by `compile` afterwards."""
    sent: list[Any] = []

    def get(spec: Any) -> Callable[..., None]:
        sent.append(spec)
        return lambda *_: None

    monkeypatch.setattr(jit, "get", get)
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: spec in sent or bundle.has(spec.name))
    monkeypatch.setenv("GLULAM_CACHE_DIR", str(tmp_path))
    kernels.forget_choices()
    yield sent
    kernels.forget_choices()


@pytest.mark.parametrize("experts", [8, 512])
def test_rows_per_expert_decide(experts: int) -> None:
    layer = {"experts": experts, "in_features": 4096, "intermediate": 1408, "out_features": 4096}
    for average, tile, other in ((8, SMALL, LARGE), (128, LARGE, SMALL), (5000, LARGE, SMALL)):
        rows = average * experts
        choice = choose(problem(rows=rows, **layer), ARCH)
        assert isinstance(choice.spec, GroupedMlpSpec)
        assert choice.spec.fc1.tile == choice.spec.fc2.tile == tile
        assert f"{rows} rows" in choice.why and f"{tile.name} takes about" in choice.why
        assert choice.why_not[0].startswith(f"{other.name}: about ") and "times as long" in choice.why_not[0]


@pytest.mark.parametrize(
    ("n", "k", "tile"),
    [
        (4096, 576, WGRAD_WIDE),
        (5120, 1344, WGRAD_WIDE),
        (5760, 2880, WGRAD),  # nearly as much of either
        (4096, 14336, WGRAD),
        (2048, 768, WGRAD),
        (8, 192, WGRAD),
    ],
)
def test_what_pads_less_makes_weight_gradients(n: int, k: int, tile: TileConfig) -> None:
    wgrad = Problem("grouped_wgrad", "bfloat16", 4096, 8, k, out_features=n, out_dtype="float32")
    choice = choose(wgrad, ARCH)
    assert choice.spec == GroupedWgradSpec("bfloat16", "float32", tile)
    assert f"{tile.name} serves weights of {n} x {k}" in choice.why
    (other,) = {WGRAD, WGRAD_WIDE} - {tile}
    assert choice.why_not[0].startswith(f"{other.name}: its tiles, padding included, cover ")


def test_both_weight_gradients_of_an_mlp_share_a_tile() -> None:
    """The tuner's question; as much as both pad together decides."""
    both = Problem("grouped_wgrad", "bfloat16", 4096, 8, 576, 1344, 576, "swiglu", out_dtype="bfloat16")
    assert both.weights == ((2688, 576), (576, 1344))
    choice = choose(both, ARCH)
    assert choice.spec == GroupedWgradSpec("bfloat16", "bfloat16", WGRAD_WIDE)
    assert "2688 x 576 and 576 x 1344" in choice.why


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("experts", [1, 3000, 1 << 31])
def test_hardly_any_rows_an_expert(rows: int, experts: int) -> None:
    assert isinstance(choose(problem(rows=rows, experts=experts), ARCH).spec, GroupedMlpSpec)


def test_every_choice_is_shipped() -> None:
    ships = set(shipped_specs())
    for rows in (8, 2000, 100_000):
        for dtype in ("bfloat16", "float16"):
            for transpose_w in (False, True):
                mm = problem(op="grouped_mm", rows=rows, dtype=dtype, transpose_w=transpose_w, activation="none")
                assert choose(mm, ARCH).spec in ships
            for out_dtype in (dtype, "float32"):
                wgrad = problem(op="grouped_wgrad", rows=rows, dtype=dtype, out_dtype=out_dtype, activation="none")
                assert choose(wgrad, ARCH).spec in ships
            for (activation, layout), width in itertools.product(activation_forms(), (64, 72)):
                form = {"rows": rows, "dtype": dtype, "activation": activation, "glu_layout": layout}
                form |= {"intermediate": width}
                assert choose(problem(**form), ARCH).spec in ships
                assert choose(problem(op="grouped_dglu", **form), ARCH).spec in ships
                for preact in (False, True):
                    assert choose(problem(op="grouped_glu", save_preact=preact, **form), ARCH).spec in ships


def test_a_preferred_kernel_of_several_activations_serves_each_at_any_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ships for those rows: on the small tile kernels are compiled for one activation."""
    monkeypatch.setenv("GLULAM_CACHE_DIR", str(tmp_path))
    wide = {"in_features": 2048, "intermediate": 2048, "out_features": 2048}
    asked = [problem(rows=rows, activation="geglu", glu_layout="interleaved", **wide) for rows in (8, 100_000)]
    few, many = (choose(one, ARCH).spec for one in asked)
    assert family_of(few) != family_of(many)
    for preferred in (many, few):  # the narrower form stands above
        known.prefer(preferred, keep=False)
        assert [choose(one, ARCH).spec for one in asked] == [preferred] * 2
    other = problem(rows=8, activation="reglu", glu_layout="concat", **wide)
    assert choose(other, ARCH).spec == many
    known.forget()


class TestExplain:
    def test_cpu_tensors(self) -> None:
        x, w = torch.zeros(4, 8), torch.zeros(2, 8, 8)
        told = glulam.explain(glulam.grouped_mm, x, w, splits=[1, 2])
        assert (told.op, told.device, told.spec, told.source) == ("grouped_mm", "cpu", None, "reference")
        assert "CPU reference" in repr(told)

    def test_shapes(self, bundle: FakeBundle) -> None:
        told = glulam.explain("grouped_mlp", (1024, 2048), (128, 1536, 2048), (128, 2048, 768), b1=(128, 1536))
        assert told.source == "shipped" and told.spec is not None and told.spec.name in repr(told)
        assert "8 an expert" in told.why and "measured on NVIDIA H200" in told.why and told.device.startswith("cuda")
        assert any(LARGE.name in reason for reason in told.why_not)
        half = glulam.explain("grouped_glu", (9999, 64), [2, 1280, 64], dtype=torch.float16, glu_layout="interleaved")
        assert isinstance(half.spec, GroupedGluSpec) and half.spec.dtype == "float16" and half.spec.tile == LARGE

    def test_tensors_on_a_gpu(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        x, w = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(2, 16, 8, dtype=torch.bfloat16)
        offs = torch.zeros(2, dtype=torch.int32)
        told = glulam.explain("grouped_glu", x, w, offs=offs, activation="geglu")
        glulam.grouped_glu(x, w, offs=offs, activation="geglu")
        assert told.spec is not None and fake_gpu.specs == [told.spec, told.spec]
        assert len(fake_gpu.launches) == 1

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    def test_a_layer(self, fake_gpu: FakeGpu, recipe: str) -> None:
        """Of tensors or of shapes, the kernels that route and moe then launch."""
        x, logits = torch.zeros(6, 64, dtype=torch.bfloat16), torch.zeros(6, 4)
        w1, w2 = torch.zeros(4, 128, 64, dtype=torch.bfloat16), torch.zeros(4, 64, 64, dtype=torch.bfloat16)
        told = [glulam.explain("route", logits, 2), glulam.explain(glulam.route, (6, 4), 2)]
        routing = glulam.route(logits, 2)
        given = {"recipe": recipe, "activation": "situ", "gate_cap": 3.0}
        of_moe = [glulam.explain(glulam.moe, x, routing, w1, w2, **given)]
        of_moe.append(glulam.explain("moe", (6, 64), (6, 2), (4, 128, 64), (4, 64, 64), **given))
        glulam.moe(x, routing, w1, w2, **given)
        route, *others = (spec for spec in fake_gpu.specs if isinstance(spec, (LayerSpec, GroupedMlpSpec)))
        for specs, launched, op in ((told, route, "route"), (of_moe, others[-1], "moe")):
            assert {one.op for one in specs} == {op} and {one.spec for one in specs} == {launched}
        with pytest.raises(ValueError, match="x has 6 tokens, but routing is of 5"):
            glulam.explain("moe", (6, 64), (5, 2), (4, 128, 64), (4, 64, 64))
        with pytest.raises(TypeError, match="routing is a int"):
            glulam.explain("moe", (6, 64), 5, (4, 128, 64), (4, 64, 64))

    def test_a_missing_bundle(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setenv("GLULAM_BUNDLE", str(tmp_path))
        told = glulam.explain("grouped_mm", (64, 64), (2, 64, 64))
        assert told.source == "missing" and "glulam build" in told.why

    def test_native_kernels_that_nobody_ran(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.setenv("GLULAM_BUNDLE", str(tmp_path))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpus, "cuda_index", lambda *_: 0)
        told = {}
        for passed_over in ("", "sm_100a"):
            here = gpus.Gpu("NVIDIA B200", "sm_100", 148, passed_over)
            monkeypatch.setattr(gpus, "gpu", lambda _, here=here: here)
            told[passed_over] = glulam.explain("grouped_mm", (64, 64), (2, 64, 64))
        assert told[""].spec == told["sm_100a"].spec and told["sm_100a"].spec.arch == "sm_100"
        (why_not,) = set(told["sm_100a"].why_not) - set(told[""].why_not)
        assert "never run on any GPU; the sm_100 kernels serve: `glulam build --arch sm_100a`" in why_not
        (tmp_path / "sm_100a").mkdir()
        (tmp_path / "sm_100a" / "manifest.json").touch()
        told_again = str(glulam.explain("grouped_mm", (64, 64), (2, 64, 64)))
        assert "  why not  the sm_100a kernels were built, never run here; the sm_100 kernels serve: " in told_again
        assert told_again.endswith(": `GLULAM_ARCH=sm_100a glulam validate` tries them")

    def test_refuses_what_the_call_refuses(self) -> None:
        with pytest.raises(ValueError, match="op is 'grouped_conv'.*grouped_mlp"):
            glulam.explain("grouped_conv", (1, 2))
        with pytest.raises(ValueError, match="w has shape"):
            glulam.explain("grouped_mm", (64, 64), (2, 64, 32))
        with pytest.raises(ValueError, match="multiple of 8"):
            glulam.explain("grouped_mm", (64, 60), (2, 64, 60))
        with pytest.raises(TypeError, match="dtype and device go with shapes"):
            glulam.explain("grouped_mm", torch.zeros(1, 8), torch.zeros(1, 8, 8), splits=[1], dtype=torch.float16)
        with pytest.raises(TypeError, match="tile"):
            glulam.explain("grouped_mm", (64, 64), (2, 64, 64), tile=3)

    @pytest.mark.parametrize(
        ("error", "words", "arguments", "options"),
        [
            (ValueError, "x is \\(-1, 64\\); give the sizes", ((-1, 64), (2, 64, 64)), {}),
            (ValueError, "w is \\(2, 64, 1267", ((64, 64), (2, 64, 1 << 100)), {}),
            (TypeError, "x is a tuple", (("64", 64), (2, 64, 64)), {}),
            (TypeError, "x is a tuple", ((True, 64), (2, 64, 64)), {}),
            (TypeError, "w is a int", ((64, 64), 5), {}),
            (TypeError, "w is a NoneType", ((64, 64), None), {}),
            (ValueError, "w has shape", ((64, 64), ()), {}),
            (TypeError, "argument: 'w'", ((64, 64),), {}),
            (TypeError, "dtype is 'int9'", ((64, 64), (2, 64, 64)), {"dtype": "int9"}),
            (TypeError, "dtype is 3", ((64, 64), (2, 64, 64)), {"dtype": 3}),
            (ValueError, "device is 'gpu'", ((64, 64), (2, 64, 64)), {"device": "gpu"}),
            (ValueError, "device is 300", ((64, 64), (2, 64, 64)), {"device": 300}),
            (TypeError, "device is True", ((64, 64), (2, 64, 64)), {"device": True}),
            (TypeError, "transpose_w is", ((64, 64), (2, 64, 64)), {"transpose_w": "yes"}),
        ],
    )
    def test_names_the_argument_that_is_wrong(
        self, error: type[Exception], words: str, arguments: Any, options: Any
    ) -> None:
        with pytest.raises(error, match=words):
            glulam.explain("grouped_mm", *arguments, **options)

    def test_a_dtype_may_be_a_name(self, bundle: FakeBundle) -> None:
        told = glulam.explain("grouped_mm", (64, 64), (2, 64, 64), dtype="float16")
        assert told.spec is not None and told.spec.dtype == "float16"


class TestCompile:
    def test_keywords_make_a_spec_and_prefer_it(self, compiled: list[Any]) -> None:
        spec = glulam.compile(op="grouped_glu", dtype=torch.bfloat16, activation="geglu", tile=(128, 128, 64))
        assert spec == GroupedGluSpec(activation="geglu", tile=TILE) and compiled == [spec]
        for rows in (1, 100_000):
            told = glulam.explain("grouped_glu", (rows, 64), (2, 128, 64), activation="geglu")
            assert (told.spec, told.source) == (spec, "jit") and "glulam.compile" in told.why
        for other in (
            {},
            {"activation": "geglu", "glu_layout": "interleaved"},
            {"activation": "geglu", "dtype": torch.float16},
        ):
            assert glulam.explain("grouped_glu", (1, 64), (2, 128, 64), **other).source == "shipped"

    def test_a_whole_mlp(self, compiled: list[Any]) -> None:
        spec = glulam.compile(
            op="grouped_mlp", activation="silu", tile=[64, 128, 64], cluster=(1, 2), schedule="cooperative"
        )
        tile = TileConfig(64, 128, 64, 1, 2)
        assert spec == GroupedMlpSpec(GroupedGluSpec(activation="silu", tile=tile), GroupedMmSpec(tile=tile))

    def test_a_spec_that_ships_is_not_compiled(self, compiled: list[Any]) -> None:
        spec = GroupedMmSpec(tile=SMALL)
        assert glulam.compile(spec) is spec and not compiled
        assert glulam.explain("grouped_mm", (100_000, 64), (2, 64, 64)).spec == spec

    def test_plans_made_before_are_dropped(self, fake_gpu: FakeGpu, compiled: list[Any]) -> None:
        x, w = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
        offs = torch.zeros(2, dtype=torch.int32)
        glulam.grouped_mm(x, w, offs=offs)
        spec = glulam.compile(op="grouped_mm", tile=TILE)
        glulam.grouped_mm(x, w, offs=offs)
        assert fake_gpu.specs[-1] == spec and len(fake_gpu.specs) == 2

    def test_refusals(self, compiled: list[Any]) -> None:
        for error, words, call in (
            (TypeError, "a spec or keywords", lambda: glulam.compile(GroupedMmSpec(), tile=(1, 2, 3))),
            (TypeError, "tile is 128; give 3 integers", lambda: glulam.compile(op="grouped_mm", tile=128)),
            (TypeError, "cluster is", lambda: glulam.compile(op="grouped_mm", cluster=(1.5, 1))),
            (SpecError, "op=None", lambda: glulam.compile(tile=(128, 128, 64))),
            (SpecError, "op='conv'", lambda: glulam.compile(op="conv")),
            (SpecError, "no field 'stages'", lambda: glulam.compile(op="grouped_mm", stages=4)),
            (SpecError, "no field 'transpose_w'", lambda: glulam.compile(op="grouped_wgrad", transpose_w=True)),
            (SpecError, "activation='swish'", lambda: glulam.compile(op="grouped_mlp", activation="swish")),
            (SpecError, "dtype='float32'", lambda: glulam.compile(op="grouped_mm", dtype=torch.float32)),
            (TypeError, "spec is 'grouped_mm'; give a spec.*op='grouped_mm'", lambda: glulam.compile("grouped_mm")),
            (TypeError, "cluster is None", lambda: glulam.compile(op="grouped_mm", cluster=None)),
            (TypeError, "schedule is \\['x'\\]", lambda: glulam.compile(op="grouped_mm", schedule=["x"])),
            (TypeError, "tile is \\(True, 64, 64\\)", lambda: glulam.compile(op="grouped_mm", tile=(True, 64, 64))),
            (
                TypeError,
                "cluster is given beside a TileConfig",
                lambda: glulam.compile(op="grouped_mm", tile=TILE, cluster=(1, 1)),
            ),
            (TypeError, "prefer is 'yes'", lambda: glulam.compile(op="grouped_mm", prefer="yes")),
            (SpecError, "op=\\['x'\\]", lambda: glulam.compile(op=["x"])),
            (SpecError, "dtype=3 is a int; give a str", lambda: glulam.compile(op="grouped_mm", dtype=3)),
            (
                SpecError,
                "transpose_w='no' is a str; give a bool",
                lambda: glulam.compile(op="grouped_mm", transpose_w="no"),
            ),
            (SpecError, "operands=\\[\\] is a list", lambda: glulam.compile(op="grouped_mm", operands=[])),
            (SpecError, "dgrad='x' is a str", lambda: glulam.compile(op="grouped_dglu", dgrad="x")),
            (
                SpecError,
                "quantize_mxfp8 has no field 'tile'",
                lambda: glulam.compile(op="quantize_mxfp8", tile=(1, 1, 1)),
            ),
            (SpecError, "mhc has no field 'cluster'", lambda: glulam.compile(op="mhc", cluster=(1, 1))),
        ):
            with pytest.raises(error, match=words):
                call()
        assert not compiled


class TestPreload:
    def test_loads_every_function_and_launches_none(
        self, bundle: FakeBundle, compiled: list[Any], fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        empty = torch.empty
        counters: list[tuple[torch.device, int]] = []
        monkeypatch.setattr(tickets, "prepare", lambda *where: counters.append(where))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
        monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
        assert glulam.preload() == len(bundle.specs) == len(bundle.calls)
        assert counters == [(torch.device("cuda", 0), 0)]
        for name, arguments in bundle.calls:
            spec = bundle.specs[name]
            named = bound(signature_of(spec), arguments)
            rows = [value.shape[0] for value in named.values() if isinstance(value, torch.Tensor) and value.dim() == 2]
            sizes = [named[name] for name in ("tokens", "matrices") if name in named]
            assert not any([*rows, *sizes]) and (rows or sizes or spec.op == "fold_mxfp8"), "a launch"
            given = {**named, "num_sms": SM_COUNT} if "num_sms" in named else named
            exported(spec, check_only=True)(*given.values())  # checks types and shapes as the kernel does

    def test_refusals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="device is cpu"):
            glulam.preload("cpu")
        for error, device in (
            (ValueError, "gpu"),
            (ValueError, -1),
            (ValueError, 300),
            (TypeError, True),
            (TypeError, 1.5),
        ):
            with pytest.raises(error, match=f"preload: device is {device!r}"):
                glulam.preload(device)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(glulam.UnsupportedDevice, match="no CUDA GPU"):
            glulam.preload()


IMPORT_PROBE = """
import sys, json
import torch
before = set(sys.modules)
import glulam
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_is_cheap() -> None:
    """Some hundred modules above `import torch`, nothing of the compiler, and nothing of the command line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", IMPORT_PROBE], env=env, capture_output=True, text=True, check=True)
    modules = json.loads(out.stdout)
    unwanted = ("cutlass", "cuda", "typer", "rich", "tvm_ffi", "filelock", "platformdirs")
    assert not [module for module in modules if module.split(".")[0] in unwanted]
    assert "glulam.tuner" not in modules and len(modules) <= 195
