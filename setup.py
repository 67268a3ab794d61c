"""Packages and the bundle in the wheel; everything else is in pyproject.toml.

A wheel contains the compiled kernels of the architectures that GLULAM_ARCHS names, sm_90a by default, so that its user
never compiles; a version such as 0.1.0+sm80 says of which others. GLULAM_MACHINE names the CPUs that it is for, x86_64
or aarch64, by default this machine's. An editable install does not build them: `glulam build` does, into the source
tree.
"""

import os
import re
import shutil
import sys
import warnings
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.absolute()
sys.path.insert(0, str(ROOT))  # a build front end does not put the project there

from ffi_bridge._version import __version__  # noqa: E402


def archs() -> list[str]:
    """Return the architectures that GLULAM_ARCHS names, each once."""
    chosen = list(dict.fromkeys(os.environ.get("GLULAM_ARCHS", "").split()))
    if chosen:
        from cute_kernels.architectures import ARCHS as known

        if unknown := [name for name in chosen if name not in known]:
            told = f"GLULAM_ARCHS names {unknown[0]!r}; give any of these, separated by spaces: {', '.join(known)}"
            raise SystemExit(told)
    return chosen


def machine() -> str:
    """Return the kind of CPU that GLULAM_MACHINE names; without it, this machine's."""
    from ffi_bridge.host import HOSTS, here

    chosen = os.environ.get("GLULAM_MACHINE") or here().machine
    if chosen not in HOSTS:
        raise SystemExit(f"GLULAM_MACHINE is {chosen!r}; give {' or '.join(HOSTS)}")
    return chosen


ARCHS = archs()
MACHINE = machine()
# A local version: wheels of other architectures lie side by side, and none is taken for the one that has the default.
TAG = "+" + ".".join(arch.replace("_", "") for arch in ARCHS) if ARCHS else ""

REPOSITORY = os.environ.get("GLULAM_REPOSITORY", "").rstrip("/")
RELEASE = f"v{__version__}"  # its tag


def urls() -> dict[str, str]:
    """Return the links to the repository at $GLULAM_REPOSITORY for a package index to show; none if it is not set."""
    pages = {"Repository": "", "Issues": "/issues"}
    pages |= {"Documentation": f"/tree/{RELEASE}/docs", "Changelog": f"/blob/{RELEASE}/CHANGELOG.md"}
    return {name: REPOSITORY + page for name, page in pages.items()} if REPOSITORY else {}


def readme() -> str:
    """Return README.md with its links to files led into the repository, because a package index shows the page
    alone.
    """
    text = (ROOT / "README.md").read_text()
    if not REPOSITORY:
        return text
    link = re.compile(r"(!?)(\[[^\[\]]*\])\((?![a-z]+:|#)([^()\s]+)\)")
    kinds = {"": "blob", "!": "raw"}
    return link.sub(lambda found: f"{found[1]}{found[2]}({REPOSITORY}/{kinds[found[1]]}/{RELEASE}/{found[3]})", text)


os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, a zip's oldest date: the same wheel from any checkout


class BuildWithBundle(build_py):
    """Copies the packages, then compiles the kernels into glulam/_bundle beside them."""

    def run(self) -> None:
        if not self.editable_mode:
            for package in {name.partition(".")[0] for name in self.packages}:
                # An earlier build's leftovers would be packed. Ours alone go: the folder may be anyone's (--build-lib).
                shutil.rmtree(Path(self.build_lib, package), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            self.build_bundle()

    def build_bundle(self) -> None:
        from ffi_bridge import build, host, profiles
        from ffi_bridge.progress import shown_past_pip

        with shown_past_pip():
            for arch in ARCHS or [profiles.DEFAULT]:
                folder = Path(self.build_lib, "glulam", "_bundle")
                build.build(profiles.shipped_specs(arch), folder, machine=host.named(MACHINE))


class LinuxWheel(bdist_wheel):
    """One wheel for every Python: the library's interface is TVM-FFI's, not CPython's."""

    def get_tag(self) -> tuple[str, str, str]:
        plain = super().get_tag()[2]
        libraries = list(Path(self.bdist_dir).rglob("libglulam_*.so"))
        told = libraries and not self.plat_name_supplied
        if not self.plat_name_supplied:
            plain = f"linux_{MACHINE}"
        return "py3", "none", manylinux_tag(libraries, plain) if told else plain


def manylinux_tag(libraries: list[Path], plain: str) -> str:
    """Return the wheel's manylinux tag that the libraries qualify for; the plain one, with a warning, if that cannot be
    told.
    """
    from ffi_bridge import ToolchainError, manylinux

    try:
        return manylinux.tag(libraries, plain.removeprefix("linux_"))
    except ToolchainError as error:
        warnings.warn(f"the wheel is tagged {plain}, which no package index takes: {error}", stacklevel=2)
        return plain


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    packages=find_packages(include=["ffi_bridge*", "cute_kernels*"]) + find_packages("python", include=["glulam*"]),
    package_dir={"glulam": "python/glulam"},
    cmdclass={"build_py": BuildWithBundle, "bdist_wheel": LinuxWheel},
    distclass=BinaryDistribution,
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    options={"egg_info": {"tag_build": TAG}},
)
