"""Programs to read, run and copy from."""
