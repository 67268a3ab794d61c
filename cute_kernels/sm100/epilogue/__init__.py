"""Epilogues' loads and stores for slabs whose rows lie in four places of a tile, as in tensor memory."""
