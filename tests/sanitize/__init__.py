"""Sanitizing: every kernel of a bundle once, under each tool of compute-sanitizer."""
