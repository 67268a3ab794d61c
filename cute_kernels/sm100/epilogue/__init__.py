"""How results leave tensor memory's rows, and what epilogues read from such places."""
