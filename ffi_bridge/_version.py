"""The version of the distribution: the packaging, the manifest and `glulam.__version__` read it here."""

__version__ = "0.1.0"
