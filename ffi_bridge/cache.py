"""The cache of compiled kernels on disk: its folders, its keys, and how an entry is found. Nothing here compiles.

An entry is a bundle of one function (and its stages), so the loader's checks apply to it unchanged. The entry's key,
the name of its folder, covers everything that can change the code: the spec, the sources of its kernels, the language
constructs that its kernels avoid (`cute_kernels/plain.py`), the compile options and the compiler's version.
The cache also has objects that are not linked yet, which the JIT and `glulam build` share (`objects.py`). They lie in
<root>/objects, also one folder for each key. The manifest in such a folder describes a .o file instead of a library.

    <root>/.glulam-cache         says that Glulam made this folder
    <root>/<key>/<arch>/         an entry: library and manifest
    <root>/<2 digits>.lock       the lock for making or removing entries whose key's digest begins with these digits
    <root>/<key>.damaged/        a damaged entry that was put aside
    <root>/.glulam-compile-*/    a compile in progress, or its copy if other users may rename files in <root>
    <root>/objects/              the objects, in a folder that is laid out like <root>

All other files in these folders are the user's own: they are neither counted nor touched.
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

from . import chains, folders, host, loader, locks, manifest, sources, toolchain, trust, verification
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
    """Return the cache's folder: $GLULAM_CACHE_DIR, read at each call, otherwise the user's cache folder for Glulam."""
    if chosen := os.environ.get(ENV_CACHE):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("glulam") / "kernels"


def cache_key(
    spec: Spec, tracer: str | None = None, hashes: dict[str, str] | None = None, has_ptx: bool = False,
    machine: host.Host | None = None,
) -> str:  # fmt: skip
    """Return the key of a compiled spec, for example "<spec.name>-0123456789abcdef".

    The 16 hexadecimal digits are a hash over everything that can change the code.

    Args:
        spec: the spec.
        tracer: "module:function" that traces the spec. None: the kernels' own tracer.
        hashes: the result of `sources_of`, if the caller has it. None: computed here.
        has_ptx: True: the key is for an object that is kept together with its PTX.
        machine: the CPUs for which host code is made. None: this machine's.
    """
    compiler = [(machine or host.here()).baseline, toolchain.code_versions()]
    parts = [to_dict(spec), hashes or sources_of(spec, tracer), compiler, *(["ptx"] if has_ptx else [])]
    parts += [f"plain {construct}" for construct in plain_in(spec.arch)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-{digest[:16]}"


def sources_of(
    spec: Spec, tracer: str | None = None, known: sources.Sources | None = None, of_object: bool = False
) -> dict[str, str]:  # fmt: skip
    """Return, by name, the hashes of the sources that a function is compiled from; `Manifest.sources` records them.

    There is one hash for each tracer (the function that traces a stage's spec), one for the compile process's modules
    and, for a chain, one for the C text that calls the stages.

    Args:
        spec: the function's spec.
        tracer: "module:function" that traces the spec. None: the kernels' own tracer.
        known: the sources of the tracers' package. None: this call lists them.
        of_object: True: return the hashes for a stage's object, which ignore comments, docstrings and line layout.
            False: hashes of whole files.
    """
    tracers = [sources.tracer_of(stage, tracer) for stage in stages_of(spec)]
    known = known or sources.of(sources.package_of(tracers[0]))
    if of_object:
        return sources.code_hashes(spec, tracers[0], known)
    found: dict[str, str] = {}
    for one in tracers:
        found |= sources.file_hashes(one, known)
    if text := chains.text_of([spec]):
        found[chains.__name__] = hashlib.sha256(text.encode()).hexdigest()
    return found


def load(
    entry: Path, spec: Spec, tracer: str | None = None, hashes: dict[str, str] | None = None
) -> Callable[..., Any]:
    """Verify and load the cache entry in folder `entry`, and return the function of `spec`.

    Args:
        entry: the folder that holds <arch>/.
        spec: the function's spec.
        tracer: "module:function" that traces the spec. None: the kernels' own tracer.
        hashes: the result of `sources_of`, if the caller has it. None: computed here.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: nothing was loaded.
        ToolchainError: a run-time library is not installed.
    """
    return loader.load(spec.arch, entry, hashes or sources_of(spec, tracer), spec).function(spec.name)


def find(spec: Spec, tracer: str | None = None) -> Callable[..., Any] | None:
    """Return a spec's cached function, verified and loaded; None if there is no usable entry.

    tracer: "module:function" that traces the spec. None: the kernels' own tracer.
    """
    with contextlib.suppress(BundleError):
        hashes = sources_of(spec, tracer)  # once: looking at every file is most of what finding takes
        return load(cache_root() / cache_key(spec, tracer, hashes), spec, tracer, hashes)
    return None


def make_root(root: Path) -> None:
    """Make `root`, the cache's folder, and mark it as made by Glulam unless it contains files that are not Glulam's."""
    folders.make(root)
    if not os.path.lexists(root / MARKER) and all(_is_our_name(path) for path in root.iterdir()):
        with contextlib.suppress(FileExistsError), folders.opened(root) as at:
            folders.write(MARKER, at, _MARK.encode())


def _is_our_name(path: Path) -> bool:
    """Return True if the name of a path in the cache's folder is one that Glulam gives to its own files there."""
    if path.suffix == LOCK:
        return bool(_LOCKED.fullmatch(path.stem))
    return path.name in (*NEIGHBOURS, MARKER) or bool(key_of(path))


def lock_of(root: Path, key: str) -> Path:
    """Return the lock file for a key in `root`, the cache's folder.

    Keys share 256 lock files: a lock file is never removed, and one for each key would be too many.
    """
    return root / f"{key.rpartition('-')[2][:2]}{LOCK}"


def make_entry(work: Path, arch: str) -> Path:
    """Make the folders entry/<arch> in `work` and return the inner one.

    Both get mode 0755 whatever the umask is: the loader refuses an entry that group or others can write.
    """
    inner = work / "entry" / arch
    inner.mkdir(parents=True)
    for public in (inner.parent, inner):
        public.chmod(0o755)
    return inner


@contextlib.contextmanager
def exclusive(root: Path, key: str, timeout: float = -1) -> Iterator[None]:
    """Hold the lock of a key, which one process at a time can hold; a few other keys share the lock.

    Args:
        root: the cache's folder.
        key: the key.
        timeout: seconds to wait. Negative: no limit.

    Raises:
        filelock.Timeout: another process held the lock for `timeout` seconds.
        OSError: the lock file cannot be opened, is a link, or is not empty.
    """
    with locks.locked(lock_of(root, key), timeout):
        yield


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the cache.

    Attributes:
        folder: the entry's folder <root>/<key>.
        spec: the spec of its function. None: the manifest cannot be read or does not fit the folder's name, or the
            entry was put aside.
        size: bytes on disk.
        state: "sound": valid and current, so `find` returns its function. "outdated": made by other versions or from
            other sources, never used again. "damaged": it is not loaded, and is made anew when the kernel is needed.
            "aside": it was found damaged earlier and is kept for inspection.
        problem: what is wrong with the entry. Empty: it is sound.
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
    """Parse a folder's name into {"name": a spec's name, "arch": its architecture}; empty if the name is no key."""
    key = _KEY.fullmatch(folder.name.removesuffix(DAMAGED))
    return key.groupdict() if key else {}


def _files(folder: Path) -> list[Path] | None:
    """Return the files of an entry, all in `folder`/<arch>/: a library or an object, texts (PTX, MLIR), and a manifest.

    Any of these files may be missing. None: the folder's name is not a key, or the folder has anything besides these
    files, such as a symbolic link.

    Raises:
        OSError: a folder cannot be read.
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
    """Return True if the name of a path in an entry's <arch>/ is one that Glulam gives to its own files there."""
    patterns = manifest.LIBRARY, manifest.OBJECT, manifest.TEXT
    named = next(filter(None, (pattern.fullmatch(file.name) for pattern in patterns)), None)
    return file.name == manifest.FILE or (named is not None and named["arch"] == arch)


def _is_of(found: manifest.Manifest, name: str) -> bool:
    """Return True if a manifest describes exactly the function `name` and the stages that its record lists."""
    function = found.functions.get(name)
    return function is not None and found.functions.keys() == {name, *function.stages}


def _spec_in(folder: Path) -> Spec | None:
    """Return the spec in an entry's manifest, whoever owns the file; None if the spec and the folder's name differ."""
    key = key_of(folder)
    with contextlib.suppress(Exception):  # a spec's own checks expect a program's mistakes, not a file's
        found = manifest.read(folder / key["arch"], trust.anybodys(folder))
        spec = from_dict(found.functions[key["name"]].spec)
        hash(spec)  # a field of a file's may be a list
        return spec if spec.name == key["name"] and _is_of(found, spec.name) else None
    return None


def _verify(folder: Path, spec: Spec | None, pattern: re.Pattern[str]) -> None:
    """Check an entry as `load` does, and check that its key is the one that `cache_key` returns now.

    Args:
        folder: the entry's folder.
        spec: its spec. None: the manifest has no spec that this version knows.
        pattern: the pattern for the name of the library, `manifest.LIBRARY` or `manifest.OBJECT`.

    Raises:
        BundleError: a check failed.
    """
    key = key_of(folder)
    inner = folder / key["arch"]
    if spec is None:
        found = verification.check(inner, key["arch"], manifest.read(inner).sources, pattern=pattern)
        if not _is_of(found, key["name"]):
            raise BundleDamaged(f"damaged bundle: {folder} holds other functions than its name says; {_REMEDY}")
        raise BundleOutdated(f"outdated bundle: {folder} is of a kernel that this Glulam does not have; {_REMEDY}")
    hashes, texts = sources_of(spec, of_object=pattern is manifest.OBJECT), manifest.read(inner).texts
    if folder.name != cache_key(spec, hashes=hashes, has_ptx=bool(texts)):
        raise BundleOutdated(
            f"outdated bundle: {folder} was compiled with other options, versions or sources; {_REMEDY}"
        )
    found = verification.verify(inner, key["arch"], hashes, spec, pattern)
    with verification.opened_library(inner, found) as library:
        if f"{chains.symbol(spec.name)}\0".encode() not in os.pread(library, found.size, 0):
            raise BundleDamaged(f"damaged bundle: {inner / found.library} has no function {spec.name}; remove it")
    for suffix in texts:
        verification.read_text(inner, found, suffix)


def _examine(folder: Path, marked: bool, pattern: re.Pattern[str]) -> Entry | None:
    """Return the entry in a folder; None if the folder is not an entry that Glulam made.

    Args:
        folder: the folder.
        marked: the cache's folder has Glulam's mark. False: the folder is an entry only if its manifest fits its name.
        pattern: the kind of entries: `manifest.LIBRARY` (linked kernels) or `manifest.OBJECT` (objects).
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
        _verify(folder, spec, pattern)
    except BundleError as error:
        state = "outdated" if isinstance(error, BundleOutdated) else "damaged"
        problem = str(error) if isinstance(error, BundleForeign) else f"{str(error).rpartition('; ')[0]}; {_REMEDY}"
        return Entry(folder, spec, size, state, problem)
    return Entry(folder, spec, size, "sound")


def entries(root: Path | None = None, pattern: re.Pattern[str] = manifest.LIBRARY) -> Iterator[Entry]:
    """Yield every entry of the cache, verified, in the order of their names. Nothing is loaded.

    Args:
        root: the folder of the entries. None: `cache_root()`, which holds linked kernels.
        pattern: the kind of entries: `manifest.LIBRARY` (linked kernels) or `manifest.OBJECT` (objects).
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
        if entry := _examine(folder, marked, pattern):
            yield entry


def _warn(what: str) -> None:
    warnings.warn(f"kernel cache: {what}", RuntimeWarning, stacklevel=3)


def discard(folder: Path) -> None:
    """Remove an entry's folder. Each file is removed by its name inside an opened folder, so no link is followed.

    Raises:
        OSError: the folder belongs to another user, or has files that are not an entry's; then nothing is removed.
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
    """Open a path with `flags`, in the open folder `at` if given, until `stack` closes; return the descriptor."""
    handle = os.open(path, flags, dir_fd=at)
    stack.callback(os.close, handle)
    return handle


def remove(entry: Entry, pattern: re.Pattern[str] = manifest.LIBRARY) -> bool:
    """Remove an entry, unless another process is making it or has replaced it.

    Processes that have loaded the entry's library keep it.

    Args:
        entry: an entry that `entries` yielded.
        pattern: the kind of entry: `manifest.LIBRARY` (linked kernels) or `manifest.OBJECT` (objects).

    Returns:
        True if the entry was removed. If it cannot be removed, a RuntimeWarning says why.
    """
    import filelock

    folder = entry.folder
    try:
        with exclusive(folder.parent, folder.name.removesuffix(DAMAGED), timeout=0):
            now = _examine(folder, marked=True, pattern=pattern)
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
    root: Path | None = None, states: tuple[str, ...] = STATES, pattern: re.Pattern[str] = manifest.LIBRARY
) -> list[Entry]:
    """Remove entries, and folders that killed compiles left. Return the removed entries.

    Args:
        root: the folder of the entries. None: `cache_root()`, which holds linked kernels.
        pattern: the kind of entries: `manifest.LIBRARY` (linked kernels) or `manifest.OBJECT` (objects).
        states: the states (`Entry.state`) of the entries to remove.
    """
    root = root or cache_root()
    sweep(root, COMPILING)
    return [entry for entry in entries(root, pattern) if entry.state in states and remove(entry, pattern)]
