"""Warning about versions of other packages with which an integration was not tested."""

from __future__ import annotations

import importlib.metadata
import warnings


def warn_if_untested(package: str, known: tuple[str, ...]) -> None:
    """Warn if the installed version of a package is not one of the tested minor versions `known`, such as "5.17"."""
    version = importlib.metadata.version(package) or "of unknown version"  # None where metadata have no version
    if ".".join(version.split(".")[:2]) not in known:
        tested = f"{', '.join(known)} {'were' if len(known) > 1 else 'was'}"
        warnings.warn(f"{package} {version} was not tested with Glulam; {tested}", RuntimeWarning, stacklevel=3)
