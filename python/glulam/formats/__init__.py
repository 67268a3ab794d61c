"""Formats of quantised weights, a folder each: the tensor class, its quantiser, and the `form.Form` kernels read."""
