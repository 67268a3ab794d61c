"""Warning about package versions that an integration was not tested with."""

from __future__ import annotations

import importlib.metadata
import warnings


def warn_if_untested(package: str, known: tuple[str, ...]) -> None:
    """Warn in one line if an installed package has none of the minor versions `known`, such as "5.17"."""
    version = importlib.metadata.version(package) or "of unknown version"  # None where metadata have no version
    if ".".join(version.split(".")[:2]) not in known:
        tested = f"{', '.join(known)} {'were' if len(known) > 1 else 'was'}"
        warnings.warn(f"{package} {version} was not tested with Glulam; {tested}", RuntimeWarning, stacklevel=3)
