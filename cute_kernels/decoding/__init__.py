"""Weights in a narrow format as bfloat16 numbers: what is known of a format on any GPU."""
