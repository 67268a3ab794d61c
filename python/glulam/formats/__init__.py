"""Formats of quantised weights, a folder each: its tensor, how it is made, and how kernels read it (`form.Form`)."""
