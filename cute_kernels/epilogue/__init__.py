"""Epilogues that all architectures share; each architecture brings its own slots and stores."""
