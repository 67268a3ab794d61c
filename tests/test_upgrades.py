"""Files of earlier versions, in `tests/upgrades`: each is refused or converted, and never misread.

Each file has the form that an older version wrote, and is never regenerated: a format change adds a new file.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import glulam
from cute_kernels.specs import GroupedMmSpec
from cute_kernels.tiles import TileConfig
from ffi_bridge import BundleOutdated, __version__, cache, loader, manifest, stamps, verification
from glulam import MXFP4Tensor, MXFP8Tensor
from glulam.choose import choose, kernels, known
from glulam.choose import table as tables
from glulam.choose.problem import Problem

pytest_plugins = ["support.fixtures"]
pytestmark = pytest.mark.usefixtures("bare_machine")
UPGRADES = Path(__file__).parent / "upgrades"
ARCH, GPU = "sm_90a", "NVIDIA Fake"
MM = Problem("grouped_mm", "bfloat16", 256, 16, 1024, 0, 2048)
OLD = GroupedMmSpec(tile=TileConfig(128, 192, 64))
"""The kernel that old tables and preferences name, which this version does not ship for MM."""


def put(name: str, place: Path) -> Path:
    """Install an old file with a mode that only its owner can write; return its path."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(UPGRADES / name, place)
    for path in (place, place.parent):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def test_every_file_is_of_a_test() -> None:
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in UPGRADES.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("manifest-schema-1.json", r"has manifest schema 1, this Glulam reads \d+; run `glulam build --arch sm_90a "),
        ("manifest-0.0.9.json", r"was built with glulam 0\.0\.9, installed is .*; run `glulam build --arch sm_90a "),
    ],
)
class TestBundles:
    def test_a_bundle_is_outdated(self, name: str, words: str, tmp_path: Path) -> None:
        folder = put(name, tmp_path / ARCH / manifest.FILE).parent
        data = json.loads((UPGRADES / name).read_text())
        (folder / data["library"]).write_bytes(b"a library")
        for look in (verification.check, verification.verify, lambda folder, arch: loader.load(arch, folder.parent)):
            with pytest.raises(BundleOutdated, match=words):
                look(folder, ARCH)

    def test_an_entry_of_the_cache_is_not_found(self, name: str, words: str, tmp_path: Path) -> None:
        """Under its own key, which a change of version or sources would give another name."""
        root = tmp_path / "cache"
        cache.make_root(root)
        folder = put(name, root / cache.cache_key(OLD) / ARCH / manifest.FILE).parent
        folder.parent.chmod(0o755)
        data = json.loads((UPGRADES / name).read_text())
        (folder / data["library"]).write_bytes(b"a library")
        assert cache.find(OLD) is None
        with pytest.raises(BundleOutdated, match="outdated bundle"):
            cache.load(folder.parent, OLD)


def chosen() -> tuple[Any, list[str]]:
    kernels.forget_choices()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        spec = choose(MM, ARCH, GPU).spec
    return spec, [str(one.message) for one in seen]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tuned-schema-2.json", "another version of Glulam wrote it: its schema is 2, this one reads 3"),
        ("tuned-0.0.9.json", "with glulam 0.0.9, installed is"),
    ],
)
def test_a_tuned_table_is_not_served_and_said(name: str, words: str, tmp_path: Path) -> None:
    put(name, tmp_path / "tuned.json")
    spec, said = chosen()
    assert spec != OLD and len(said) == 1 and words in said[0] and str(tmp_path / "tuned.json") in said[0]


def test_a_section_of_another_version_is_kept_beside_a_new_one(tmp_path: Path) -> None:
    path = put("tuned-0.0.9.json", tmp_path / "tuned.json")
    old = json.loads(path.read_text())["sections"][0]
    tables.write(path, [tables.Section(tables.stamp_of(GPU), {})])
    kept = json.loads(path.read_text())["sections"]
    assert old in kept and len(kept) == 2


@pytest.mark.parametrize("name", ["grouped_mm-0123456789abcdef.json", "preferred-0.0.9.json"])
def test_a_preference_is_not_served_and_said_and_cleared(name: str) -> None:
    known.prefer(OLD)  # makes the folder, and one of this version
    (new,) = known.folder().glob("*.json")
    assert chosen()[0] == OLD, "a preference of this version is served"
    path = new if name.startswith("preferred") else new.with_name(name)
    new.unlink()
    put(name, path)
    path.parent.chmod(0o700)
    spec, said = chosen()
    assert spec != OLD and len(said) == 1 and str(path) in said[0] and "glulam cache clear --preferred" in said[0]
    assert known.clear_preferences() == 1 and not path.exists()


def test_a_stamp_of_another_version_does_not_count() -> None:
    """It names the same GPU and library, which another version may have tried less hard."""
    gpu, library = "NVIDIA A100", "ab" * 32
    file = stamps.leave("sm_80", gpu, library)
    assert stamps.is_there("sm_80", gpu, library) and f" of {__version__} ".encode() in file.read_bytes()
    put("validated.stamp", file)
    file.parent.chmod(0o700)
    assert not stamps.is_there("sm_80", gpu, library)
    assert stamps.leave("sm_80", gpu, library) == file and stamps.is_there("sm_80", gpu, library)


def old_state() -> dict[str, Tensor]:
    """Return the state of a GroupedMLP with separate experts, in the first version's format."""
    data = json.loads((UPGRADES / "state-dict.json").read_text())
    return {name: torch.tensor(values).view(data["shapes"][name]) for name, values in data["entries"].items()}


def mlp(**options: Any) -> Any:
    return glulam.nn.GroupedMLP(2, 8, 8, dtype=torch.float32, **options)


def test_a_state_dict_in_the_other_layout_is_converted() -> None:
    state, packed, apart = old_state(), mlp(), mlp(packed=False)
    apart.load_state_dict(state)
    packed.load_state_dict(state)
    x, offs = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 5], dtype=torch.int32)
    assert torch.equal(packed(x, offs=offs), apart(x, offs=offs))
    assert torch.equal(packed.fc1.weight[1], state["fc1.weight1"])


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "an expert is missing": (lambda state: state.pop("fc1.weight1"), "Missing key.*fc1.weight"),
    "a name that was given up": (lambda state: state.update({"w1": state["fc1.weight0"]}), "Unexpected.*w1"),
    "another order of dimensions": (
        lambda state: state.update({"fc1.weight0": state["fc1.weight0"].mT}), "size mismatch|Missing key"
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_dict_that_does_not_fit_is_refused(change: str) -> None:
    state, (make, words) = old_state(), CHANGES[change]
    make(state)
    module = mlp()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=words):
        module.load_state_dict(state)
    if "size" not in words:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()
                   if name.startswith("fc1") and "w1" not in state)  # fmt: skip


def weight() -> Tensor:
    return torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_quantised_tensor_without_the_fields_of_later_versions_has_their_defaults() -> None:
    """MXFP8Tensors were once of one block and one layout of scales."""
    made = glulam.quantize_mxfp8(weight()[0])
    state = {name: value for name, value in made.__getstate__().items() if name in ("data", "scale")}
    old = object.__new__(MXFP8Tensor)
    old.__setstate__(state)
    assert torch.equal(old.dequantize(), made.dequantize()) and old.scale_layout == "plain"


@pytest.mark.parametrize("change", ["a field of a later version", "a part of another dtype", "scales of another shape"])
def test_a_quantised_tensor_of_another_form_is_refused(change: str) -> None:
    made = glulam.quantize_mxfp4(weight())
    state = made.__getstate__()
    if change.startswith("a field"):
        state["order"] = "columns"
    elif change.startswith("a part"):
        state["scale"] = made.scale.float()
    else:
        state["scale"] = state["scale"][..., :0]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        object.__new__(MXFP4Tensor).__setstate__(state)
