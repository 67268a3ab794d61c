"""Sizes that the host's workspaces and the kernels must agree on. Plain Python: imports no compiler."""

from __future__ import annotations

CTAS_PER_SM = 4
"""Of post_mix's backward: of 128 threads with up to 128 registers each. Every CTA leaves a row of partial sums."""
