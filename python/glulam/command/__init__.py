"""The command `glulam`: `cli` registers all its commands, `app` declares a command."""
