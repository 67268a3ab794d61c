"""Runs the command `glulam` as `python -m glulam`."""

from .command.cli import main

if __name__ == "__main__":
    main()
