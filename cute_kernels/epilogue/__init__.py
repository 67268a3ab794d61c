"""From accumulators to results in memory, by whatever slots and stores an architecture has."""
