"""Weights in a narrow format as bfloat16 numbers: what is known of elements and of scales on any GPU."""
