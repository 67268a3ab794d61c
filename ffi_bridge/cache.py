"""The cache of compiled kernels on disk: where it is, what is in it, how an entry is found. Nothing here compiles.

An entry is a bundle of one function, so the loader's checks apply to it unchanged. Its key covers everything that can
change the code: the spec, the sources that its kernels are made of, what they do without (`cute_kernels/plain.py`), the
compile options and the compiler's version.
Objects that are not linked yet, which the JIT and `glulam build` share, lie in <root>/objects in the same form: a key
of the same kind, and a manifest beside a .o instead of a library (`objects.py`).

    <root>/.glulam-cache         says that Glulam made this folder
    <root>/<key>/<arch>/         an entry: library and manifest
    <root>/<2 digits>.lock       held while an entry is made or removed whose key's digest begins so
    <root>/<key>.damaged/        an entry that was put aside
    <root>/.glulam-compile-*/    a compile in progress, or its copy where others may rename what lies in <root>
    <root>/objects/              the same for objects

Whatever else lies there is somebody's own: it is neither counted nor touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_kernels.chains import stages_of
from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec, from_dict, to_dict

from . import chains, folders, host, loader, locks, manifest, sources, toolchain, trust
from .errors import BundleDamaged, BundleError, BundleForeign, BundleOutdated
from .scratch import sweep

ENV_CACHE = "GLULAM_CACHE_DIR"
MARKER, COMPILING, DAMAGED, LOCK = ".glulam-cache", ".glulam-compile-", ".damaged", ".lock"
OBJECTS = "objects"
NEIGHBOURS = (OBJECTS, "preferred", "tuning", "validated")  # folders that other parts of Glulam keep in the cache's
STATES = ("sound", "outdated", "damaged", "aside")

_KEY = re.compile(r"(?P<name>[a-z0-9_]+_(?P<arch>sm_[0-9]{1,4}[a-z]?))-[0-9a-f]{16}")
_MARK = "Glulam made this folder for compiled kernels; `glulam cache clear` removes those, and nothing else.\n"
_LOCKED = re.compile(r"[0-9a-f]{2}")
_REMEDY = "compile it again, or run `glulam cache clear --outdated`"


def cache_root() -> Path:
    """$GLULAM_CACHE_DIR, read at each call, else the user's cache folder for glulam."""
    if chosen := os.environ.get(ENV_CACHE):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("glulam") / "kernels"


def cache_key(
    spec: Spec, tracer: str | None = None, behind: dict[str, str] | None = None, has_ptx: bool = False,
    machine: host.Host | None = None,
) -> str:  # fmt: skip
    """The spec's name and 16 hexadecimal digits over everything that changes the code.

    Args:
        tracer: "module:function" that traces it; default, the one that the kernels name for it.
        behind: `sources_of` the spec, where the caller took it just now.
        has_ptx: of an object that is kept together with its PTX.
        machine: which host code is for; default, this one.
    """
    compiler = [(machine or host.here()).baseline, toolchain.code_versions()]
    parts = [to_dict(spec), behind or sources_of(spec, tracer), compiler, *(["ptx"] if has_ptx else [])]
    parts += [f"plain {construct}" for construct in plain_in(spec.arch)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-{digest[:16]}"


def sources_of(
    spec: Spec, tracer: str | None = None, known: sources.Sources | None = None, of_object: bool = False
) -> dict[str, str]:  # fmt: skip
    """Hashes of what a spec's function is made of, as its manifest has them: of its stages, and how it chains them.

    Args:
        tracer: as of `cache_key`.
        known: the sources of the tracers' package, where the caller took them; default, taken once for all stages.
        of_object: of a stage's object alone, for which comments, docstrings and layout do not count.
    """
    tracers = [sources.tracer_of(stage, tracer) for stage in stages_of(spec)]
    known = known or sources.of(sources.package_of(tracers[0]))
    if of_object:
        return sources.code_behind(spec, tracers[0], known)
    found: dict[str, str] = {}
    for one in tracers:
        found |= sources.behind(one, known)
    if text := chains.text_of([spec]):
        found[chains.__name__] = hashlib.sha256(text.encode()).hexdigest()
    return found


def load(
    entry: Path, spec: Spec, tracer: str | None = None, behind: dict[str, str] | None = None
) -> Callable[..., Any]:
    """The function of `spec` from the entry in folder `entry`, verified and loaded.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: nothing was loaded.
        ToolchainError: a run-time library is not installed.
    """
    return loader.load(spec.arch, entry, behind or sources_of(spec, tracer), spec).function(spec.name)


def find(spec: Spec, tracer: str | None = None) -> Callable[..., Any] | None:
    """The cached function of a spec, verified and loaded; None where there is no usable entry."""
    with contextlib.suppress(BundleError):
        behind = sources_of(spec, tracer)  # once: looking at every file is most of what finding takes
        return load(cache_root() / cache_key(spec, tracer, behind), spec, tracer, behind)
    return None


def make_root(root: Path) -> None:
    """Makes the cache's folder, and marks it as Glulam's unless somebody's own files lie there already."""
    folders.make(root)
    if not os.path.lexists(root / MARKER) and all(_is_our_name(path) for path in root.iterdir()):
        with contextlib.suppress(FileExistsError), folders.opened(root) as at:
            folders.write(MARKER, at, _MARK.encode())


def _is_our_name(path: Path) -> bool:
    if path.suffix == LOCK:
        return bool(_LOCKED.fullmatch(path.stem))
    return path.name in (*NEIGHBOURS, MARKER) or bool(key_of(path))


def lock_of(root: Path, key: str) -> Path:
    """The file that is locked for a key: one of 256, since these files stay and keys come and go by the thousand."""
    return root / f"{key.rpartition('-')[2][:2]}{LOCK}"


def make_entry(work: Path, arch: str) -> Path:
    """The inner folder of a new entry in folder `work`. Whatever the umask: what others can write is not loaded."""
    inner = work / "entry" / arch
    inner.mkdir(parents=True)
    for public in (inner.parent, inner):
        public.chmod(0o755)
    return inner


@contextlib.contextmanager
def exclusive(root: Path, key: str, timeout: float = -1) -> Iterator[None]:
    """One process at a time for one key, and for the few keys that share its lock. Raises as `locks.locked`."""
    with locks.locked(lock_of(root, key), timeout):
        yield


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the cache.

    Attributes:
        folder: where it lies.
        spec: of its kernel; None where its manifest cannot be read.
        size: bytes on disk.
        state: "sound": `find` gives it; "outdated": made by other versions or of other sources, of no more use;
            "damaged": not loaded, made anew when it is next asked for; "aside": found damaged before, kept to be
            looked at.
        problem: what is wrong with it, empty where it is sound.
    """

    folder: Path
    spec: Spec | None
    size: int
    state: str
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name


def key_of(folder: Path) -> dict[str, str]:
    """What a folder's name says of its entry: the spec's `name` and `arch`; empty where it is no key."""
    key = _KEY.fullmatch(folder.name.removesuffix(DAMAGED))
    return key.groupdict() if key else {}


def _files(folder: Path) -> list[Path] | None:
    """The files of an entry: `folder`/<arch>/ with a library or an object, its texts, a manifest, or some of them.

    None where the name is no key, or anything else lies there, a symbolic link included. Raises OSError.
    """
    key = key_of(folder)
    if not key or not stat.S_ISDIR(folder.lstat().st_mode):
        return None
    archs = list(folder.iterdir())
    if any(path.name != key["arch"] or not stat.S_ISDIR(path.lstat().st_mode) for path in archs):
        return None
    files = [file for arch in archs for file in arch.iterdir()]
    ours = (_is_our_file(file, key["arch"]) and stat.S_ISREG(file.lstat().st_mode) for file in files)
    return files if all(ours) else None


def _is_our_file(file: Path, arch: str) -> bool:
    forms = manifest.LIBRARY, manifest.OBJECT, manifest.TEXT
    named = next(filter(None, (form.fullmatch(file.name) for form in forms)), None)
    return file.name == manifest.FILE or (named is not None and named["arch"] == arch)


def _is_of(found: manifest.Manifest, name: str) -> bool:
    """Whether a manifest describes the function of that name and its stages alone: those that it had when made."""
    function = found.functions.get(name)
    return function is not None and found.functions.keys() == {name, *function.stages}


def _spec_in(folder: Path) -> Spec | None:
    """The spec of the function that an entry is named by, where it holds that and its stages alone, whoever made it."""
    key = key_of(folder)
    with contextlib.suppress(Exception):  # a spec's own checks expect a program's mistakes, not a file's
        found = manifest.read(folder / key["arch"], trust.anybodys(folder))
        spec = from_dict(found.functions[key["name"]].spec)
        hash(spec)  # a field of a file's may be a list
        return spec if spec.name == key["name"] and _is_of(found, spec.name) else None
    return None


def _verify(folder: Path, spec: Spec | None, form: re.Pattern[str]) -> None:
    """Every check of `load`, and that of the key; raises BundleError."""
    key = key_of(folder)
    inner = folder / key["arch"]
    if spec is None:
        found = manifest.check(inner, key["arch"], manifest.read(inner).sources, form=form)
        if not _is_of(found, key["name"]):
            raise BundleDamaged(f"damaged bundle: {folder} holds other functions than its name says; {_REMEDY}")
        raise BundleOutdated(f"outdated bundle: {folder} is of a kernel that this Glulam does not have; {_REMEDY}")
    behind, texts = sources_of(spec, of_object=form is manifest.OBJECT), manifest.read(inner).texts
    if folder.name != cache_key(spec, behind=behind, has_ptx=bool(texts)):
        raise BundleOutdated(
            f"outdated bundle: {folder} was compiled with other options, versions or sources; {_REMEDY}"
        )
    found = manifest.verify(inner, key["arch"], behind, spec, form)
    with manifest.opened_library(inner, found) as library:
        if f"{chains.symbol(spec.name)}\0".encode() not in os.pread(library, found.size, 0):
            raise BundleDamaged(f"damaged bundle: {inner / found.library} has no function {spec.name}; remove it")
    for suffix in texts:
        manifest.read_text(inner, found, suffix)


def _examine(folder: Path, marked: bool, form: re.Pattern[str]) -> Entry | None:
    """The entry in a folder; None where it is none of Glulam's. `form`: as of `manifest.check`.

    In a folder that Glulam did not make (`marked` is false), only a manifest that fits the name proves it.
    """
    try:
        files = _files(folder)
        if files is None or not (marked or _spec_in(folder)):
            return None
        size = sum(file.lstat().st_size for file in files)
    except OSError as error:
        if not marked or isinstance(error, FileNotFoundError):
            return None
        return Entry(folder, None, 0, "damaged", f"cannot be read ({error.strerror}); remove it")
    if folder.name.endswith(DAMAGED):
        return Entry(folder, None, size, "aside", "was found damaged")
    spec = _spec_in(folder)
    try:
        _verify(folder, spec, form)
    except BundleError as error:
        state = "outdated" if isinstance(error, BundleOutdated) else "damaged"
        problem = str(error) if isinstance(error, BundleForeign) else f"{str(error).rpartition('; ')[0]}; {_REMEDY}"
        return Entry(folder, spec, size, state, problem)
    return Entry(folder, spec, size, "sound")


def entries(root: Path | None = None, form: re.Pattern[str] = manifest.LIBRARY) -> Iterator[Entry]:
    """Every entry of the cache, verified, in the order of their names. Nothing is loaded.

    Args:
        root: their folder; default, that of linked kernels.
        form: what lies in an entry, LIBRARY or OBJECT of `manifest`.
    """
    root = root or cache_root()
    try:
        folders = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        _warn(f"{root} cannot be read ({error.strerror}); set {ENV_CACHE} to another folder")
        return
    marked = os.path.lexists(root / MARKER)
    for folder in folders:
        if entry := _examine(folder, marked, form):
            yield entry


def _warn(what: str) -> None:
    warnings.warn(f"kernel cache: {what}", RuntimeWarning, stacklevel=3)


def discard(folder: Path) -> None:
    """Removes an entry's folder. Each name is removed inside the folder that was opened before it, and no other.

    Raises:
        OSError: it belongs to another user, or holds anything that is not an entry's; then nothing is removed.
    """
    if folder.lstat().st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    files = _files(folder)
    if files is None:
        raise OSError("it holds other things than a kernel")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        outer = _descriptor(stack, folder, flags)
        if (arch := key_of(folder)["arch"]) in os.listdir(outer):
            inner = _descriptor(stack, arch, flags, outer)
            for file in sorted(files, reverse=True):  # the manifest first: an entry without one is none
                os.unlink(file.name, dir_fd=inner)
            os.rmdir(arch, dir_fd=outer)
    folder.rmdir()


def _descriptor(stack: contextlib.ExitStack, path: Path | str, flags: int, at: int | None = None) -> int:
    handle = os.open(path, flags, dir_fd=at)
    stack.callback(os.close, handle)
    return handle


def remove(entry: Entry, form: re.Pattern[str] = manifest.LIBRARY) -> bool:
    """Removes an entry, unless a process is making it or made it anew since. Processes that loaded it keep it.

    Returns whether it was removed; what cannot be costs a warning.
    """
    import filelock

    folder = entry.folder
    try:
        with exclusive(folder.parent, folder.name.removesuffix(DAMAGED), timeout=0):
            now = _examine(folder, marked=True, form=form)
            if now is None or now.state != entry.state:
                return False
            discard(folder)
    except filelock.Timeout:
        return False
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        _warn(f"{folder} stays ({getattr(error, 'strerror', None) or error})")
        return False
    return True


def clear(
    root: Path | None = None, states: tuple[str, ...] = STATES, form: re.Pattern[str] = manifest.LIBRARY
) -> list[Entry]:
    """Removes those of `entries` in these states, and what killed compiles left. Returns what was removed."""
    root = root or cache_root()
    sweep(root, COMPILING)
    return [entry for entry in entries(root, form) if entry.state in states and remove(entry, form)]
