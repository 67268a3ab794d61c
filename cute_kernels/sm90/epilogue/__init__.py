"""From accumulators to results in memory."""
