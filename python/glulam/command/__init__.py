"""The command `glulam`: `cli` lists its words, `tuning` and `doctor` do the longer ones."""
