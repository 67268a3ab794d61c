"""From operands in memory to accumulators: a producer's loads, wgmma, and the formats between them."""
