"""Kernels compiled at run time: limits checked first, preferences that persist, and a serving process that compiles
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import glulam
from cute_kernels.sm90 import budget
from cute_kernels.sm90.configs import SMALL, shipped_specs
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec, Spec
from cute_kernels.tiles import SpecError, TileConfig
from ffi_bridge import cache, jit, loader, manifest, toolchain
from glulam.choose import choose, kernels, known, loadable, records, specs
from glulam.choose import table as tables
from glulam.choose.problem import Problem
from glulam.choose.shipped import shipped_choice

ARCH = "sm_90a"
TILE = TileConfig(128, 192, 64, 2, 1, "cooperative", True)
SPEC = GroupedMmSpec(tile=TILE)
MM = Problem("grouped_mm", "bfloat16", 4096, 16, 1024, 0, 2048)


def in_process(code: str, **environment: str) -> Any:
    """Run `code` in a new interpreter, with RuntimeWarnings as errors; return its output parsed as JSON."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, no known kernels and no bundle."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(loader.ENV_BUNDLE, str(tmp_path / "no bundle"))
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(loadable, "_from_cache", {})
    kernels.forget_choices()
    yield tmp_path / "cache"
    kernels.forget_choices()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A cache in which another process compiled and preferred SPEC, and that process' measurements."""
    root = tmp_path_factory.mktemp("compiled")
    told = in_process(
        """
import json, sys
import torch, tvm_ffi, glulam
from pathlib import Path
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
glulam.explain("grouped_mm", (4096, 1024), (16, 2048, 1024))
before = resident()
spec = glulam.compile(op="grouped_mm", tile=(128, 192, 64), cluster="adaptive")
print(json.dumps(dict(grown=resident() - before, name=spec.name, cutlass="cutlass" in sys.modules)))
""",
        GLULAM_CACHE_DIR=str(root),
    )
    return {**told, "root": root}


class TestLimits:
    @pytest.mark.parametrize(
        ("fields", "limit", "nearest"),
        [
            ({"tile": (96, 256, 64)}, "wgmma has 64 rows", "tile=(128, 256, 64), cluster=(1, 1)"),
            ({"tile": (256, 128, 64)}, "registers hold the accumulators of 64 or 128", "tile=(128, 128, 64)"),
            ({"tile": (128, 512, 64)}, "at most 256 columns", "tile=(128, 256, 64)"),
            ({"tile": (128, 160, 64)}, "in steps of 64", "tile=(128, 192, 64)"),
            ({"tile": (128, 128, 32)}, "a swizzle of 128 bytes", "tile=(128, 128, 64)"),
            ({"tile": (128, 128, 128)}, "does not fit operands='16bit'", "tile=(128, 128, 64)"),
            ({"tile": (64, 64, 64), "cluster": (4, 1)}, "two CTAs share", "cluster=(2, 1)"),
            ({"tile": (64, 64, 64), "cluster": "auto"}, "a cluster of 'auto'", "tile=(64, 64, 64)"),
            ({"tile": (64, 64, 64), "schedule": "pong"}, "schedule='pong'", "schedule='cooperative'"),
            ({"tile": (128, 256, 64), "schedule": "pingpong"}, "256 accumulators a thread", "tile=(128, 256, 64)"),
            (
                {"op": "grouped_dglu", "tile": (128, 192, 64), "schedule": "pingpong"},
                "192 accumulators a thread, more than 128",
                "tile=(128, 192, 64)",
            ),
            ({"op": "grouped_wgrad", "cluster": "adaptive"}, "nothing", "cluster="),
        ],
    )
    def test_a_tile_that_cannot_be_is_refused_before_compiling(
        self, empty: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limit: str, nearest: str
    ) -> None:
        monkeypatch.setattr(jit, "get", lambda *_, **__: pytest.fail("compiled"))
        limit = "no ragged row tiles" if limit == "nothing" else limit
        with pytest.raises(SpecError) as refused:
            glulam.compile(**{"op": "grouped_mm", **fields})
        assert limit in str(refused.value) and "the nearest valid choice is" in str(refused.value)
        assert nearest in str(refused.value).split("nearest valid choice")[1]

    def test_shared_memory_is_a_limit(self, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the memory that a Hopper has every tile finds room; with less, large ones do not."""
        monkeypatch.setattr(budget, "SMEM_BYTES", 96 * 1024)
        with pytest.raises(
            SpecError, match="1 stages of 49152 bytes fit into shared memory .98304 bytes.*nearest valid"
        ) as no:
            glulam.compile(op="grouped_mm", tile=(128, 256, 64))
        assert "tile=(64, 192, 64)" in str(no.value)
        with pytest.raises(SpecError, match="grouped_dglu on t128x128"):
            specs.check(GroupedDgluSpec(tile=TileConfig(128, 128, 64)))

    def test_other_mistakes_name_no_tile(self, empty: Path) -> None:
        with pytest.raises(SpecError, match="activation='swish'") as refused:
            glulam.compile(op="grouped_glu", activation="swish")
        assert "nearest" not in str(refused.value)

    def test_every_shipped_spec_is_valid(self) -> None:
        for spec in shipped_specs():
            specs.check(spec)
        tiles = [found for spec in shipped_specs() for found in budget.budgets(spec)]
        assert {found.stages for found in tiles} == {4, 5, 6, 8}

    def test_budgets_are_those_of_the_code(self, compiled: dict[str, Any]) -> None:
        """The formula against what the compiler reports; barriers and alignment come on top."""
        (entry,) = cache.entries(compiled["root"])
        (kernel,) = manifest.read(entry.folder / ARCH).functions[SPEC.name].kernels
        (found,) = budget.budgets(SPEC)
        assert found.stages == 5 and 0 <= kernel.dynamic_smem - found.smem_bytes <= budget.SMALL_BYTES
        assert found.accumulators == 96 and found.threads == 384

    @pytest.mark.parametrize("spec", [GroupedMmSpec(), GroupedGluSpec(), GroupedWgradSpec(), GroupedDgluSpec()])
    def test_every_tile_that_can_be_has_its_stages(self, spec: Spec) -> None:
        make = lambda tile: dataclasses.replace(spec, tile=tile)  # noqa: E731
        valid = specs.valid_tiles(make, ARCH)
        assert len(valid) == {"grouped_wgrad": 45, "grouped_dglu": 56}.get(spec.op, 60)
        assert all(b.stages >= 3 and b.smem_bytes <= budget.SMEM_BYTES for t in valid for b in budget.budgets(make(t)))


class TestPreferences:
    def test_later_processes_find_what_one_compiled(self, compiled: dict[str, Any]) -> None:
        assert compiled["name"] == SPEC.name and not compiled["cutlass"]
        told = in_process(
            """
import json, sys
import torch, tvm_ffi
import glulam
from ffi_bridge import worker
worker.Worker = None  # there is nothing to compile with
told = glulam.explain("grouped_mm", (4096, 1024), (16, 2048, 1024))
print(json.dumps(dict(source=told.source, name=told.spec.name, why=told.why, cutlass="cutlass" in sys.modules)))
""",
            GLULAM_CACHE_DIR=str(compiled["root"]),
            GLULAM_BUNDLE="/nowhere",
        )
        assert (told["source"], told["name"], told["cutlass"]) == ("jit", SPEC.name, False)
        assert "glulam.compile made it the preferred" in told["why"]

    def test_compiling_leaves_the_caller_as_it_was(self, compiled: dict[str, Any]) -> None:
        assert compiled["grown"] < 20 << 20, "the compiler takes some 250 MB"
        assert not compiled["cutlass"]

    def test_finding_a_compiled_kernel_looks_at_the_sources_once(
        self, compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Looking at every file of the kernels' sources is most of what finding takes, also of a chain's two stages."""
        monkeypatch.setenv(cache.ENV_CACHE, str(compiled["root"]))
        looks, look = [], toolchain.sources_of

        def counted(package: str) -> Any:
            looks.append(package)
            return look(package)

        monkeypatch.setattr(toolchain, "sources_of", counted)
        for spec, is_there in ((SPEC, True), (GroupedMlpSpec(), False)):
            looks.clear()
            for _ in range(3):
                monkeypatch.setattr(loader, "_loaded", {})
                assert (cache.find(spec) is not None) == is_there
            assert looks == ["cute_kernels"] * 3

    def test_one_that_is_gone_is_passed_over_with_one_line(self, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jit, "get", lambda spec, **_: lambda *_: None)
        with monkeypatch.context() as kept:
            kept.setattr(loadable, "is_loadable", lambda spec: True)
            assert glulam.compile(SPEC) == SPEC and choose(MM, ARCH).spec == SPEC
        monkeypatch.setattr(kernels, "_compiled", {})
        kernels.forget_choices()
        with pytest.warns(RuntimeWarning, match=f"preferred kernel {SPEC.name} is not in the cache") as seen:
            found = [choose(MM, ARCH).spec for _ in range(3)]
        assert len(seen) == 1 and set(found) == {shipped_choice(MM, ARCH).spec}

    def test_the_last_preference_counts_and_clearing_forgets_it(
        self, empty: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jit, "get", lambda spec, **_: lambda *_: None)
        monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
        for spec in (SPEC, GroupedMmSpec(tile=SMALL)):
            glulam.compile(spec)
        glulam.compile(GroupedMmSpec(tile=TileConfig()), prefer=False)
        kernels.forget_choices()
        assert choose(MM, ARCH).spec == GroupedMmSpec(tile=SMALL)
        assert known.clear_preferences() == 1 and choose(MM, ARCH).spec == shipped_choice(MM, ARCH).spec

    def test_a_folder_that_cannot_be_written_costs_a_warning(
        self, empty: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "file" / "cache"))
        monkeypatch.setattr(jit, "get", lambda spec, **_: lambda *_: None)
        with pytest.warns(RuntimeWarning, match="preferred in this process alone"):
            glulam.compile(SPEC)
        assert choose(MM, ARCH).spec == SPEC

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "glulam-preferred", "schema": 1, "form": 3}'])
    def test_what_does_not_parse_is_left_out(self, empty: Path, content: str) -> None:
        known.folder().mkdir(parents=True)
        (known.folder() / "grouped_mm-0.json").write_text(content)
        with pytest.warns(RuntimeWarning, match="preference .*grouped_mm-0.json is ignored: .*; remove it") as seen:
            assert {choose(MM, ARCH).spec for _ in range(3)} == {shipped_choice(MM, ARCH).spec}
        assert len(seen) == 1

    def test_a_users_choice_stands_above_a_table(self, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jit, "get", lambda spec, **_: lambda *_: None)
        monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
        monkeypatch.setattr(known, "read_tables", lambda *_: pytest.fail("looked into tables"))
        glulam.compile(SPEC)
        assert choose(MM, ARCH, "a GPU").spec == SPEC


SERVING = """
import json, random, subprocess, sys
import torch, tvm_ffi
import glulam
from glulam.choose import choose, kernels
from glulam.choose.problem import Problem
subprocess.Popen.__init__ = lambda *a, **k: sys.exit("a process was started")
rng, specs = random.Random(0), set()
for _ in range(3000):
    problem = Problem("grouped_mm", "bfloat16", rng.randrange(1, 1 << 20), rng.randrange(1, 300), 1024, 0, 2048)
    specs.add(choose(problem, "sm_90a", "NVIDIA Fake").spec)
for rows in (1, 77, 100_000):
    for op in ("grouped_glu", "grouped_mlp", "grouped_dglu", "grouped_wgrad"):
        problem = Problem(op, "bfloat16", rows, 7, 1024, 512, 1024, "swiglu", out_dtype="bfloat16")
        choose(problem, "sm_90a", "NVIDIA Fake")
sources = {kernels.find(spec).source for spec in specs if spec.tile.n == 192}
heavy = ("cutlass", "rich", "typer", "filelock")
new = sorted(name for name in set(sys.modules) if name.split(".")[0] in heavy)
print(json.dumps(dict(names=sorted(spec.name for spec in specs), sources=sorted(sources), new=new)))
"""


class TestServing:
    """A process that meets new row counts, expert counts, or another routing, which the host never sees."""

    def files(self, root: Path) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    def test_compiles_nothing_and_imports_no_compiler(self, compiled: dict[str, Any]) -> None:
        before = self.files(compiled["root"])
        told = in_process(SERVING, GLULAM_CACHE_DIR=str(compiled["root"]), GLULAM_BUNDLE="/nowhere")
        assert told == {"names": [SPEC.name], "sources": ["jit"], "new": []}
        assert self.files(compiled["root"]) == before

    def test_so_does_one_with_a_tuned_table(self, compiled: dict[str, Any], tmp_path: Path) -> None:
        """Of 16 experts at 1 to 4096 rows; its kernel was compiled, another one's was not."""
        (tmp_path / "cache").mkdir()
        (entry,) = cache.entries(compiled["root"])
        (tmp_path / "cache" / entry.name).symlink_to(entry.folder)
        ship = shipped_choice(MM, ARCH).spec.name
        us = {SPEC.name: {"uniform": 10.0}, ship: {"uniform": 20.0}}
        points = tuple(tables.Point(1 << n, SPEC.name, ship, 2.0, us) for n in range(13))
        layers = []
        for experts in range(1, 300):
            problem = Problem("grouped_mm", "bfloat16", 0, experts, 1024, 0, 2048)
            layers.append(tables.Layer(tables.layer_of(problem), {SPEC.name: SPEC}, points))
        table = tmp_path / "table.json"
        tables.write(table, [tables.section(tables.stamp_of("NVIDIA Fake"), *layers)])
        told = in_process(
            SERVING, GLULAM_CACHE_DIR=str(tmp_path / "cache"), GLULAM_BUNDLE="/nowhere", GLULAM_TUNED=str(table)
        )
        assert SPEC.name in told["names"] and (told["sources"], told["new"]) == (["jit"], [])

    def test_choosing_looks_at_no_file_again(self, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[Any] = []
        for module, name in ((records, "read"), (known, "tables"), (known, "_preferences")):
            look = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *args, look=look: looks.append(look) or look(*args))
        choose(MM, ARCH, "NVIDIA Fake")
        assert looks
        looks.clear()
        for rows in range(200):
            choose(dataclasses.replace(MM, rows=rows), ARCH, "NVIDIA Fake")
        assert not looks


def test_forms_of_an_mlp_are_told_apart(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "get", lambda spec, **_: lambda *_: None)
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
    spec = GroupedMlpSpec(GroupedGluSpec(activation="silu", tile=TileConfig(64, 128, 64)), GroupedMmSpec(tile=SMALL))
    glulam.compile(spec)
    mlp = Problem("grouped_mlp", "bfloat16", 64, 4, 64, 64, 64, "silu")
    assert choose(mlp, ARCH).spec == spec
    assert choose(MM, ARCH).spec != spec.fc2 or MM.rows == 0
