"""Tile schedulers, which choose a CTA's next tile. They work from group sizes that only the device knows. work.py
defines tiles."""
