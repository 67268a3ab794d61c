"""Formats of quantised weights: one folder for each format, with its tensor class, its quantiser, and its layout for
kernels (a subclass of `form.Form`).
"""
