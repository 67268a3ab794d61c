"""Manifests with arbitrary damage: every reader raises one of the bridge's errors, and opens no library."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import BundleError, build, cache, load, loader, manifest, toolchain, verification
from ffi_bridge.compiler import KernelArtifact
from ffi_bridge.resources import KernelResources
from toys import linked_as

ARCH = "sm_90a"
SPEC = GroupedMmSpec()
MUTATIONS = 2000

# Written into the text: JSON's writer has limits of its own.
DEEP, HUGE = "(deep)", "(huge)"
RAW = {f'"{DEEP}"': "[" * 100_000 + "]" * 100_000, f'"{HUGE}"': "9" * 5000}

ODD = st.sampled_from(
    [None, True, False, 0, -1, 1, 2**31, 2**63, 1.5, float("nan"), float("inf"), DEEP, HUGE, [], {}, [[]], {"": {}}]
    + [
        "",
        "x",
        "\ud800",
        "a\nb",
        "\x1b[2J",
        "../../evil.so",
        "/etc/passwd",
        "x" * 70_000,
        "sm_90a",
        "0" * 64,
        [1],
        {"a": 1},
    ]
).map(copy.deepcopy)
KEYS = st.sampled_from(["", "x", "this.x", "\ud800", "a\nb", "__class__", "sha256", "functions", "cute_kernels"])


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache entry whose library differs from its manifest's description, so that nothing may load it."""
    root = tmp_path_factory.mktemp("fuzzed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENV_CACHE, str(root))
        patch.setattr(build, "link", linked_as(b"a library"))
        patch.setattr(loader, "_open_library", lambda path, needs: pytest.fail(f"executed {path}"))
        sources = {"cute_kernels": toolchain.sources_hash("cute_kernels")}
        patch.setattr(toolchain, "sources_hash", lambda package: sources[package])  # once: it looks at every file
        cache.make_root(root)
        folder = root / cache.cache_key(SPEC)
        (folder / ARCH).mkdir(parents=True)
        kernels = (KernelResources("kernel", 168, 0, 0, 1024, 230400, ("C7510",)),)
        artifact = KernelArtifact(SPEC.name, root / "kernel.o", kernels)
        made = build.write_bundle(folder / ARCH, ARCH, [SPEC], [artifact], sources)
        assert verification.verify(folder / ARCH, ARCH, spec=SPEC) == made
        (folder / ARCH / made.library).write_bytes(b"another  ")
        yield folder


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


@st.composite
def structures(draw: st.DrawFn, sound: dict[str, Any]) -> bytes:
    """Draw the document's bytes with a few values replaced, removed, renamed or duplicated."""
    data = copy.deepcopy(sound)
    twice = ""
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(_places(data)) or [({}, "")]))
        match draw(st.sampled_from(["replace", "remove", "add", "rename", "twice"])):
            case "replace":
                container[key] = draw(ODD)
            case "remove" if key in container or isinstance(container, list):
                del container[key]
            case "add" | "rename" if isinstance(container, dict):
                container[draw(KEYS)] = draw(ODD)
            case "twice":
                twice = f', "{draw(st.sampled_from(sorted(sound)))}": {json.dumps(draw(ODD))}'
    text = json.dumps(data)
    text = text[:-1] + twice + text[-1:]
    for written, meant in RAW.items():
        text = text.replace(written, meant)
    return text.encode()


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """Draw the file's bytes with some bytes changed, inserted, removed or cut off."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(0, 8))
        data[at : at + length] = draw(st.binary(max_size=8))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def test_any_damage_is_told_and_nothing_is_opened(entry: Path) -> None:
    inner = entry / ARCH
    file = inner / manifest.FILE
    sound = file.read_bytes()
    refused = 0
    listed = json.loads(sound)
    listed["functions"][SPEC.name]["spec"]["tile"]["adaptive"] = []  # no hash

    @settings(
        max_examples=MUTATIONS,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @example(json.dumps(listed).encode())
    @given(st.one_of(structures(json.loads(sound)), damaged(sound)))
    def look(content: bytes) -> None:
        nonlocal refused
        file.write_bytes(content)
        try:
            manifest.read(inner)
        except BundleError as error:
            refused += 1
            assert str(error).isprintable() and str(inner) in str(error)
        for use in (verification.verify, lambda folder, arch: load(arch, folder.parent)):
            with pytest.raises(BundleError) as told:
                use(inner, ARCH)
            assert str(told.value).isprintable() and str(inner) in str(told.value)
        assert cache.find(SPEC) is None
        (found,) = cache.entries()
        assert found.state in ("damaged", "outdated") and found.problem.isprintable()

    look()
    assert refused > MUTATIONS / 2, "most mutations are seen by the fields' forms"
