"""Decoding of quantised weights in kernels, to 16-bit or FP8 numbers. This folder has what all architectures share.

elements.py has the element types, scales.py the scale types. lines.py decodes weights for data gradients, which
contract over the weights' rows. rows_in_fp8.py decodes 4-bit weights to FP8.
"""
