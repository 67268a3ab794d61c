"""What every kernel is written with: memory by address, lanes of a warp, selects, vectors."""
