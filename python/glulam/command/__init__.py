"""The command `glulam`: `cli` has them all, `app` says how one is declared."""
