"""Tuned tables and preferences with arbitrary content: errors in them cause a warning, and no wrong kernel is used."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.specs import (
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    Spec,
    to_dict,
)
from cute_kernels.tiles import TileConfig
from glulam.choose import choose, kernels, known, loadable, records
from glulam.choose import table as tables
from glulam.choose.problem import Problem
from glulam.choose.shipped import families_of, family_of, shipped_choice

pytest_plugins = ["support.fixtures"]
ARCH, GPU = "sm_90a", "NVIDIA Fake"
TILE = TileConfig(128, 192, 64)
MM = Problem("grouped_mm", "bfloat16", 256, 16, 1024, 0, 2048)
GLU = Problem("grouped_glu", "bfloat16", 256, 16, 1024, 512, 0, "swiglu")
SPEC = GroupedMmSpec(tile=TILE)
GLU_SPEC = GroupedGluSpec(tile=TILE)
OTHER_FORMS: dict[str, Spec] = {
    "transposed": GroupedMmSpec(transpose_w=True, tile=TILE),
    "of another dtype": GroupedMmSpec("float16", tile=TILE),
    "of another operator": GroupedGluSpec(tile=TILE),
    "of MXFP8": GroupedMmSpec(tile=TileConfig(128, 256, 128), operands="mxfp8"),
    "with decoded weights": GroupedMmSpec(
        tile=TileConfig(64, 256, 128, schedule="swapped_single"), operands="mxfp8_weight_only"
    ),
}
MISMATCHES: list[tuple[Problem, Spec]] = [
    *((MM, spec) for spec in OTHER_FORMS.values()),
    (dataclasses.replace(MM, transpose_w=True), SPEC),
    (GLU, GroupedGluSpec(activation="geglu", tile=TILE)),
    (GLU, GroupedGluSpec(glu_layout="interleaved", tile=TILE)),
    (GLU, GroupedGluSpec(save_preact=True, tile=TILE)),
    (GLU, GroupedMlpSpec(GroupedGluSpec(tile=TILE), SPEC)),
    (Problem("grouped_dglu", "bfloat16", 9, 16, 64, 64, 0, "swiglu"), GroupedDgluSpec(activation="silu")),
    (Problem("grouped_wgrad", "bfloat16", 9, 16, 64, 0, 64, out_dtype="float32"), GroupedWgradSpec(tile=TILE)),
]


@pytest.fixture(autouse=True)
def table(bare_machine: Path) -> Path:
    """Path of the only tuned table."""
    return bare_machine


def described(problem: Problem, spec: Spec) -> dict[str, Any]:
    """Return a table in which a kernel is the fastest for a problem at 1 and 16 rows per expert."""
    shipped = shipped_choice(problem, ARCH).spec
    us = {spec.name: {"uniform": 10.0}, shipped.name: {"uniform": 20.0}}
    points = tuple(tables.Point(rows, spec.name, shipped.name, 2.0, us) for rows in (1.0, 16.0))
    layer = tables.Layer(tables.layer_of(problem), {spec.name: spec}, points)
    section = tables.section(tables.stamp_of(GPU), layer)
    return json.loads(tables.text([section]))


def layer_of(data: dict[str, Any]) -> dict[str, Any]:
    return data["sections"][0]["layers"][0]


def point_of(data: dict[str, Any]) -> dict[str, Any]:
    return layer_of(data)["points"][0]


def stamp_of(data: dict[str, Any]) -> dict[str, Any]:
    return data["sections"][0]["stamp"]


def chosen_with_one_line(problem: Problem, match: str) -> Spec:
    """Return the spec chosen in three calls, which together must give exactly one matching warning."""
    with pytest.warns(RuntimeWarning, match=match) as seen:
        (spec,) = {choose(problem, ARCH, GPU).spec for _ in range(3)}
    assert len(seen) == 1
    assert any(str(seen[0].message) == reason for reason in choose(problem, ARCH, GPU).why_not)
    return spec


class TestTables:
    @pytest.mark.parametrize(("problem", "spec"), MISMATCHES, ids=[spec.name for _, spec in MISMATCHES])
    def test_a_kernel_of_another_form_is_never_chosen(self, table: Path, problem: Problem, spec: Spec) -> None:
        table.write_text(json.dumps(described(problem, spec)))
        shipped = shipped_choice(problem, ARCH).spec
        assert chosen_with_one_line(problem, f"{table} is ignored in part.*{spec.name} is of another form") == shipped
        assert known.tuned_specs(GPU) == []

    def test_the_one_that_is_sound_is(self, table: Path) -> None:
        table.write_text(json.dumps(described(MM, SPEC)))
        assert choose(MM, ARCH, GPU).spec == SPEC

    @pytest.mark.parametrize("name", ["us", "gain", "rows_per_expert"])
    @pytest.mark.parametrize("number", [0, -1.0, "1", None, True, [], 1e400, -1e400, 10**400], ids=repr)
    def test_what_is_no_positive_number_is_said(self, table: Path, name: str, number: Any) -> None:
        data = described(MM, SPEC)
        if name == "us":
            point_of(data)["us"][SPEC.name]["uniform"] = number
        else:
            point_of(data)[name] = number
        table.write_text(json.dumps(data).replace("Infinity", "1e400"))
        assert chosen_with_one_line(MM, "layer 1: .* is .*, not a number") != SPEC
        with pytest.raises(ValueError, match=f"{table} holds what `glulam tune` does not write"):
            tables.read(table)

    @pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
    def test_json_has_no_such_numbers(self, table: Path, constant: str) -> None:
        table.write_text(json.dumps(described(MM, SPEC)).replace("10.0", constant))
        assert chosen_with_one_line(MM, f"does not parse .{constant} is no number.; it is ignored, remove it") != SPEC

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda data: layer_of(data)["points"].append(point_of(data)), "two points have the same number of rows"),
            (lambda data: point_of(data).pop("gain"), "one of points lacks 'gain'"),
            (lambda data: point_of(data).update(more=1), "one of points has no field 'more'"),
            (lambda data: point_of(data).update(us={}), "the chosen kernel of a point has no times"),
            (lambda data: point_of(data)["us"].update({SPEC.name: {}}), "a kernel has no times"),
            (lambda data: point_of(data)["us"].update({SPEC.name: {"other": 1}}), "times of different routings"),
            (lambda data: layer_of(data).update(points=3), "points=3 is a int; give a list"),
            (lambda data: layer_of(data).update(kernels=[]), "no kernel is described that is named"),
            (lambda data: layer_of(data).update(kernels=[[]]), "one of kernels=.* is a list; give an object"),
            (lambda data: layer_of(data)["kernels"][0].pop("arch"), "lacks fields"),
            (lambda data: layer_of(data)["kernels"][0]["tile"].update(m=128.0), "m=128.0 is a float; give"),
            (lambda data: layer_of(data)["kernels"][0].update(transpose_w="no"), "transpose_w='no' is a str"),
            (lambda data: layer_of(data)["kernels"][0].update(op=["grouped_mm"]), "op is a list; give text"),
            (lambda data: layer_of(data)["problem"].update(experts=0), "grouped_mm needs experts, got 0"),
            (lambda data: layer_of(data)["problem"].update(experts="16"), "experts='16' is a str; give a int"),
            (lambda data: layer_of(data)["problem"].update(out_features=1 << 40), "out_features is"),
            (lambda data: layer_of(data)["problem"].update(rows=16), "names rows"),
            (lambda data: layer_of(data)["problem"].update(op="conv"), "op is 'conv'"),
            (lambda data: layer_of(data)["problem"].update(dtype="int8"), "dtype='int8'"),
            (lambda data: layer_of(data)["problem"].update(save_preact=False), "by default"),
            (
                lambda data: data["sections"][0]["stamp"].update(gpu=["x"]),
                "section 1: gpu is a list; give a str",
            ),
            (lambda data: data["sections"][0]["stamp"].update(gpu="\x1b[2J"), "section 1: gpu is .*x1b"),
            (lambda data: data["sections"][0]["stamp"].update(date="\ud800"), "section 1: date is .*ud800"),
            (lambda data: data["sections"][0].update(layers={}), "section 1: layers is a dict"),
        ],
    )
    def test_what_the_tuner_does_not_write_is_said(
        self, table: Path, change: Callable[[dict[str, Any]], Any], words: str
    ) -> None:
        data = described(MM, SPEC)
        change(data)
        table.write_text(json.dumps(data))
        assert chosen_with_one_line(MM, f"is ignored in part.*{words}") != SPEC

    def test_the_rest_of_a_file_serves(self, table: Path) -> None:
        data = described(MM, SPEC)
        glu = GroupedGluSpec(tile=TILE)
        layers = data["sections"][0]["layers"]
        layers += [3, layer_of(described(GLU, glu)), copy.deepcopy(layer_of(data))]
        data["sections"] += ["nothing", copy.deepcopy(data["sections"][0])]
        table.write_text(json.dumps(data))
        with pytest.warns(RuntimeWarning, match=r"layer 2: it=3 is a int.*\(and 3 more\)") as seen:
            assert [choose(problem, ARCH, GPU).spec for problem in (MM, GLU)] == [SPEC, glu]
        assert len(seen) == 1

    def test_a_stamp_without_versions_holds_nowhere(self, table: Path) -> None:
        data = described(MM, SPEC)
        data["sections"][0]["stamp"]["versions"] = {}
        table.write_text(json.dumps(data))
        assert chosen_with_one_line(MM, "measured with glulam None, installed is") != SPEC

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"{}" * 3, b" " * (records.MOST_BYTES + 1)])
    def test_what_is_no_json_is_said(self, table: Path, content: bytes) -> None:
        table.write_bytes(content)
        assert chosen_with_one_line(MM, f"{table} is no table of tuned kernels: it .*; it is ignored, remove") != SPEC

    @pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
    def test_what_is_no_file_is_said(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
        place = tmp_path / "tuned"
        place.mkdir()
        monkeypatch.setenv(known.ENV_TUNED, str(place))
        strange = place / "x.json"
        {"folder": strange.mkdir, "link": lambda: strange.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(strange)}[
            kind
        ]()
        (place / "a.json").write_text(json.dumps(described(MM, SPEC)))
        with pytest.warns(RuntimeWarning, match="x.json is no table of tuned kernels") as seen:
            assert choose(MM, ARCH, GPU).spec == SPEC
        assert len(seen) == 1

    def test_a_damaged_one_is_never_written_over(self, table: Path) -> None:
        data = described(MM, SPEC)
        point_of(data)["gain"] = 0
        table.write_text(json.dumps(data))
        with pytest.raises(ValueError, match="gain is 0, not a number"):
            tables.write(table, [])
        assert json.loads(table.read_text()) == data

    def test_writing_follows_no_link_and_leaves_nothing(self, table: Path) -> None:
        victim = table.with_name("victim")
        victim.write_text("mine")
        table.with_name(f".{table.name}.new").symlink_to(victim)
        (section,) = (tables.Section(tables.stamp_of(GPU), {}),)
        tables.write(table, [section])
        assert victim.read_text() == "mine" and tables.read(table) == [section] and not table.is_symlink()
        assert not [path for path in table.parent.glob(".*.new") if not path.is_symlink()]

    def test_a_section_of_another_version_is_kept(self, table: Path) -> None:
        """It may hold kernels and problems that this version does not know; a later one has it back."""
        data = described(MM, SPEC)
        data["sections"][0]["stamp"]["versions"]["glulam"] = "0.0.1"
        layer_of(data)["problem"]["temperature"] = 3
        layer_of(data)["kernels"].append({"op": "grouped_mm", "swizzle": {"of": 3}})
        table.write_text(json.dumps(data))
        tables.write(table, [tables.Section(tables.stamp_of(GPU), {})])
        assert json.loads(table.read_text())["sections"][0] == data["sections"][0]


def prefer(spec: Spec) -> Path:
    """Store a preference; return its file, after clearing the process' memory of it."""
    known.prefer(spec)
    kernels.forget_choices()
    (path,) = known.folder().glob("*.json")
    return path


class TestPreferences:
    @pytest.mark.parametrize("name", OTHER_FORMS)
    def test_a_kernel_of_another_form_is_never_chosen(self, name: str) -> None:
        path = prefer(SPEC)
        data = json.loads(path.read_text())
        layer_of(data)["kernels"] = [to_dict(OTHER_FORMS[name])]
        path.write_text(json.dumps(data))
        assert chosen_with_one_line(MM, "is of another form.*cache clear --preferred") != SPEC
        assert list(known.all_loadable()) == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda data: stamp_of(data)["versions"].update(glulam="0.0.1"), "written with glulam 0.0.1, installed is"),
            (lambda data: stamp_of(data).update(gpu=GPU), "measured on NVIDIA Fake"),
            (lambda data: data.update(schema=1), "another version of Glulam"),
            (lambda data: data.update(format="glulam-preferred"), "another version of Glulam"),
            (lambda data: data.update(more=1), "other fields than format, schema"),
            (lambda data: layer_of(data).update(problem=3), "problem=3 is a int; give an object"),
            (lambda data: layer_of(data).update(kernels=[{"op": "grouped_mm"}]), "lacks fields"),
            (lambda data: layer_of(data).update(kernels=[]), "of another form than it says"),
            (lambda data: layer_of(data).update(problem=to_dict(SPEC)), "of another form than it says"),
            (lambda data: layer_of(data).update(points=[point_of(described(MM, SPEC))]), "or it has points"),
            (lambda data: layer_of(data).update(problem=tables.layer_of(MM)), "op|lacks fields|has no field"),
            (lambda data: layer_of(data)["kernels"].append(to_dict(GroupedMmSpec())), "of another form than it says"),
        ],
    )
    def test_what_compile_does_not_write_is_said(self, change: Callable[[dict[str, Any]], Any], words: str) -> None:
        path = prefer(SPEC)
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        assert chosen_with_one_line(MM, f"{path} is .*{words}.*; .*run `glulam cache clear --pref") != SPEC
        assert known.clear_preferences() == 1 and not path.exists()

    def test_the_rest_of_a_file_serves(self) -> None:
        prefer(GLU_SPEC)
        path = prefer(SPEC)
        data = json.loads(path.read_text())
        data["sections"][0]["layers"][0]["kernels"] = []
        path.write_text(json.dumps(data))
        with pytest.warns(RuntimeWarning, match="is ignored in part.*layer 1") as seen:
            assert choose(MM, ARCH).spec == SPEC and choose(GLU, ARCH).spec != GLU_SPEC
        assert len(seen) == 1

    @pytest.mark.parametrize("content", [b'{"format": "glulam-preferred"}', b'{"format": "glulam-tuned", "schema": 1}'])
    def test_a_damaged_file_is_replaced_by_the_next_preference(self, content: bytes) -> None:
        path = prefer(GLU_SPEC)
        path.write_bytes(content)
        assert prefer(SPEC) == path
        assert choose(MM, ARCH).spec == SPEC and choose(GLU, ARCH).spec != GLU_SPEC

    def test_what_earlier_versions_wrote_is_said_and_cleared(self) -> None:
        """A file for each form."""
        path = prefer(SPEC)
        old = path.with_name("grouped_glu-0123456789abcdef.json")
        form = to_dict(family_of(GLU_SPEC))
        told = {"format": "glulam-preferred", "schema": 2, "glulam": "0.1.0", "form": form, "spec": to_dict(GLU_SPEC)}
        old.write_text(json.dumps(told))
        with pytest.warns(RuntimeWarning, match=f"{old} .*another version.*it is ignored, run `glulam cache clear"):
            assert choose(MM, ARCH).spec == SPEC and choose(GLU, ARCH).spec != GLU_SPEC
        assert known.clear_preferences() == 2 and not old.exists() and not path.exists()

    @pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"[]", b'{"format": "glulam-bundle"}'])
    def test_clearing_removes_what_is_certainly_ours(self, tmp_path: Path, content: bytes) -> None:
        path = prefer(SPEC)
        text = path.read_text()
        left = [
            path.with_name(name) for name in ("grouped_mm-0000000000000000.json", "notes.json", "link.json", "d.json")
        ]
        left[0].write_bytes(content)
        left[1].write_text(text)
        (tmp_path / "victim").write_text(text)
        left[2].symlink_to(tmp_path / "victim")
        left[3].mkdir()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert choose(MM, ARCH).spec == SPEC
        assert sorted(str(each.message).split()[2] for each in seen) == sorted(map(str, left))
        assert all(str(each.message).endswith("; remove it") for each in seen)
        assert known.clear_preferences() == 1
        assert sorted(known.folder().glob("*.json")) == sorted(left) and (tmp_path / "victim").read_text() == text

    def test_a_folder_that_is_a_link_is_left(self, tmp_path: Path) -> None:
        path = prefer(SPEC)
        known.folder().rename(tmp_path / "elsewhere")
        known.folder().symlink_to(tmp_path / "elsewhere")
        assert choose(MM, ARCH).spec != SPEC and known.clear_preferences() == 0
        assert (tmp_path / "elsewhere" / path.name).exists()

    def test_dropping_one_keeps_the_others_and_those_of_other_versions(self) -> None:
        prefer(GLU_SPEC)
        path = prefer(SPEC)
        data = json.loads(path.read_text())
        data["sections"].append(copy.deepcopy(data["sections"][0]))
        data["sections"][1]["stamp"]["versions"]["glulam"] = "0.0.1"
        data["sections"][1]["layers"][0]["problem"]["temperature"] = 3
        path.write_text(json.dumps(data))
        assert choose(MM, ARCH).spec == SPEC
        assert known.drop_preference(SPEC.name)
        assert choose(MM, ARCH).spec == shipped_choice(MM, ARCH).spec, "in this process, too"
        assert known.read_preferences().preferred == {family_of(GLU_SPEC): GLU_SPEC}
        assert data["sections"][1] in json.loads(path.read_text())["sections"]
        text = path.read_text()
        assert not known.drop_preference(SPEC.name) and path.read_text() == text

    def test_the_last_one_dropped_leaves_a_file_of_none(self) -> None:
        path = prefer(SPEC)
        assert known.drop_preference(SPEC.name) and not known.read_preferences().ignored
        assert known.clear_preferences() == 0 and not path.exists()

    def test_one_that_was_dropped_does_not_come_back(self) -> None:
        for spec in (SPEC, GLU_SPEC):
            prefer(spec)
        assert all(known.drop_preference(spec.name) for spec in (SPEC, GLU_SPEC))
        prefer(GroupedMmSpec())
        assert known.read_preferences().preferred == {family_of(SPEC): GroupedMmSpec()}

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), NotImplementedError("no locks")])
    def test_what_cannot_be_written_stays(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        path = prefer(SPEC)
        text = path.read_text()

        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(tables, "write", fail)
        with pytest.raises(OSError, match=f"{path} cannot be written: (No space left|no locks)"):
            known.write_preference(GroupedMmSpec())
        with pytest.raises(OSError, match=f"{path} cannot be written: (No space left|no locks)"):
            known.drop_preference(SPEC.name)
        assert path.read_text() == text
        with pytest.warns(RuntimeWarning, match="in this process alone .*cannot be written"):
            known.prefer(GLU_SPEC)

    def test_one_that_is_not_compiled_here_is_named_with_the_line_that_drops_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefer(SPEC)
        monkeypatch.setattr(loadable, "is_loadable", lambda spec: False)
        with pytest.warns(RuntimeWarning, match=f"or run `glulam cache forget {SPEC.name}`"):
            assert choose(MM, ARCH).spec != SPEC

    def test_what_is_not_kept_replaces_nothing(self) -> None:
        path = prefer(SPEC)
        text = path.read_text()
        with pytest.warns(RuntimeWarning, match="in this process alone .its kernel was not kept"):
            known.prefer(GroupedMmSpec(), keep=False)
        assert choose(MM, ARCH).spec == GroupedMmSpec() and path.read_text() == text
        kernels.forget_choices()
        assert choose(MM, ARCH).spec == SPEC


def test_paths_are_shown_in_one_line() -> None:
    assert records.shown("/a b/ä.json") == "/a b/ä.json"
    assert records.shown(os.fsdecode(b"/a\n\xff")) == r"'/a\n\udcff'"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3),
    st.sampled_from(["grouped_glu", "grouped_mm", "float16", "sm_90a", "geglu", "mxfp8", "pingpong", 64, 128, 2, 1e308,
                     5e-324, [], {}, [[]], {"op": "grouped_mm"}, SPEC.name, 10**400]),
)  # fmt: skip


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key or index) in JSON data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = [(data, key) for key, _ in items]
    return found + [pair for _, value in items for pair in places(value)]


def mutated(data: Any, draw: Callable[..., Any]) -> bytes:
    """Return JSON with one to three changes of its structure or of its bytes."""
    data = copy.deepcopy(data)
    if draw(st.integers(0, 3)):
        for _ in range(draw(st.integers(1, 3))):
            there = places(data)
            if not there:
                break
            held, key = there[draw(st.integers(0, len(there) - 1))]
            change = draw(st.sampled_from(["set", "set", "remove", "twice", "swap", "rename"]))
            other, other_key = there[draw(st.integers(0, len(there) - 1))]
            if change == "set":
                held[key] = copy.deepcopy(draw(VALUES))
            elif change == "remove":
                del held[key]
            elif change == "twice" and isinstance(held, list):
                held.append(copy.deepcopy(held[key]))
            elif change == "swap":
                held[key] = copy.deepcopy(other[other_key])
            elif isinstance(held, dict):
                held[draw(st.text(max_size=3))] = held.pop(key)
        return json.dumps(data).encode()
    content = bytearray(json.dumps(data).encode())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content) - 1))
        content[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(content)


FUZZ = settings(max_examples=1000, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def choose_with_warnings(monkeypatch: pytest.MonkeyPatch) -> int:
    """Check that kernels which are chosen, or looked up on disk, belong to their problems' families. Return the number
    of warnings.
    """
    looked_for: list[Spec] = []
    kernels.forget_choices()
    with warnings.catch_warnings(record=True) as seen, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(loadable, "is_loadable", lambda spec: looked_for.append(spec) or True)
        known.ignored(GPU)
        assert not looked_for, "reading alone asks for nothing"
        for problem in (MM, dataclasses.replace(MM, rows=3), GLU):
            spec = choose(problem, ARCH, GPU).spec
            forms = {family_of(each) for each in (spec, *looked_for)}
            assert forms <= set(families_of(problem, ARCH))
            looked_for.clear()
        list(known.all_loadable())
        list(known.all_loadable(GPU))
    assert {each.category for each in seen} <= {RuntimeWarning}
    return len(seen)


@pytest.fixture(scope="module")
def sound_table() -> dict[str, Any]:
    data = described(MM, SPEC)
    data["sections"][0]["layers"].append(layer_of(described(GLU, GLU_SPEC)))
    return data


@FUZZ
@given(data=st.data())
def test_any_table_is_served_or_warned_of_once(
    table: Path, sound_table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    table.write_bytes(mutated(sound_table, data.draw))
    assert choose_with_warnings(monkeypatch) <= 1
    try:
        sections = tables.read(table)
    except ValueError as error:
        assert str(error).isprintable()
    else:
        table.write_text(tables.text(sections))
        assert tables.read(table) == sections


@pytest.fixture
def sound_preference() -> tuple[Path, Any]:
    path = prefer(SPEC)
    return path, json.loads(path.read_text())


@FUZZ
@given(data=st.data())
def test_any_preference_is_served_or_warned_of_once(
    sound_preference: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    path, sound = sound_preference
    path.write_bytes(mutated(sound, data.draw))
    assert choose_with_warnings(monkeypatch) <= 1
