"""Formats of quantised weights, a folder each: tensor class, quantiser, and `form.Form`, the layout
that kernels read.
"""
