"""How TMA reaches experts' weights and rows of a group."""
