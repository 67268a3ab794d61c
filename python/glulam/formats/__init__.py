"""Formats of quantised weights, a folder each, with tensor class, quantiser, and `form.Form` (layout for kernels)."""
