"""Kernels around a layer's experts: routing of tokens to experts, and sums of the experts' results."""
