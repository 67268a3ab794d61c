"""Tile schedulers: they choose a CTA's next tile from group sizes that only the device knows. work.py defines tiles."""
